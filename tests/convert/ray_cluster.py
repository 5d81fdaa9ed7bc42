"""A Ray cluster of two nodes with one worker each, on this machine, for as long as standard input is open.

Prints its address. Run as a script: a cluster that ends with its process cannot outlive a test that is killed.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

# The smallest object store that Ray accepts: nothing of a checkpoint ever goes through it.
NODE = {
    "num_cpus": 1,
    "num_gpus": 0,
    "object_store_memory": 80 * 2**20,
    # Ray takes 127.0.0.1 for another name of the outward address; the rest of the loopback range it leaves alone.
    "node_ip_address": "127.0.0.2",
    "include_dashboard": False,
}


def main() -> None:
    # Sockets lie in this folder and their paths have little room, so pytest's own folders will not do.
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": sys.argv[1]})
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
