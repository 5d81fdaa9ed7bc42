"""Time and memory of `weightprep convert` against `cp -r` and other converters, in one run on one disk.

    python scripts/bench_convert.py                                        # a small one: about two minutes
    python scripts/bench_convert.py --mode linked --shard-size 0.4GB       # a third of the shards hold a match
    python scripts/bench_convert.py --shard-size 0.2GB 1GB 4GB --size 6GB  # memory must not follow the shards
    python scripts/bench_convert.py --peers naive compressed-tensors llm-compressor --llm-compressor VENV/bin/python

Every run starts with a cold page cache and ends with a sync. The order of the contenders turns round from one round to
the next, because whoever runs second finds another disk. Each conversion's result is verified before it is timed.
Printed are medians and ranges, the ratio to `cp -r`, CPU seconds, peak resident memory, and the load of the machine,
without which no figure here means anything.

What is cold: `--cold all` drops the whole page cache before each run, the programs' own files with it (takes root);
`--cold checkpoint` drops the pages of the checkpoint alone, as on a machine where the programs ran before; `--cold
nothing` leaves all where it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from weightprep.checkpoint.repository import Checkpoint, TensorRef
from weightprep.checkpoint.writer import ShardWriter

OURS = [sys.executable, "-m", "weightprep"]
# About what a layer takes with the attention dims of GLM-5 and no more experts than it must have.
LAYER_BYTES = 4e8
PEERS = Path(__file__).with_name("convert_peers.py")


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run: seconds until the sync returned, CPU seconds and peak resident MB of the process."""

    seconds: float
    cpu: float
    resident_mb: float


@dataclass(frozen=True, slots=True)
class Contender:
    """:param command: "{source}" and "{out}" stand for the two directories
    :param rounds: in how many rounds it takes part
    """

    name: str
    command: tuple[str, ...]
    rounds: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["full", "linked"], default="full", help="full copy, or hard links where")
    parser.add_argument(
        "--size", type=gigabytes, default="1.2GB", help="of the synthetic checkpoint, about: whole layers"
    )
    parser.add_argument("--shard-size", type=gigabytes, nargs="+", default=[gigabytes("0.4GB")])
    parser.add_argument("--rounds", type=int, default=2, help="an even number runs both orders equally often")
    parser.add_argument("--peers", nargs="*", default=[], choices=["naive", "compressed-tensors", "llm-compressor"])
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--llm-compressor", default=sys.executable, metavar="PYTHON", help="interpreter that has it")
    parser.add_argument("--sidecar", action="store_true", help="time --layout sidecar as well")
    parser.add_argument("--tiny", action="store_true", help="small dims: shows that the script runs, and nothing else")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cold", choices=["all", "checkpoint", "nothing"], default="all")
    parser.add_argument("--directory", type=Path, help="where to work; default: the system's temporary directory")
    return parser.parse_args()


def gigabytes(text: str) -> int:
    """Bytes of "1.5GB"."""
    found = re.fullmatch(r"([\d.]+)GB", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1.5GB")
    return int(float(found[1]) * 1e9)


def main() -> None:
    """Make a checkpoint, cut it into shards of each size, and compare."""
    options = parse()
    # with one module for each LAYER_BYTES, or for three times as many; NextN's layer comes on top
    layers = max(1, round(options.size / LAYER_BYTES / (1 if options.mode == "full" else 3)) - 1)
    print(platform.platform(), f"Python {platform.python_version()}, {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        work = Path(name)
        made = work / "made"
        shape = ["--layers", str(layers), "--shards", "2", *([] if options.tiny else ["--full-dims"])]
        if options.mode == "linked":
            shape += ["--size", f"{options.size / 1e9}GB"]
        subprocess.run([*OURS, "synth", str(made), *shape], check=True, stdout=subprocess.DEVNULL)
        for shard_bytes in options.shard_size:
            source = work / "source"
            cut(made, source, shard_bytes)
            compare(options, source, work / "out")
            shutil.rmtree(source)


def cut(made: Path, source: Path, shard_bytes: int) -> None:
    """The checkpoint `made` in shards of `shard_bytes`, in order, as publishers cut them."""
    checkpoint = Checkpoint.open(made)
    shards: list[list[TensorRef]] = [[]]
    for ref in checkpoint.tensors.values():
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + ref.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(ref)
    source.mkdir()
    index: dict[str, str] = {}
    for number, refs in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        with ShardWriter(source / name, [ref.info for ref in refs], {"format": "pt"}) as writer:
            writer.copy(refs)
            writer.finish()
        index |= {ref.name: name for ref in refs}
    size = sum(ref.nbytes for ref in checkpoint.tensors.values())
    document = {"metadata": {"total_size": size}, "weight_map": index}
    (source / "model.safetensors.index.json").write_text(json.dumps(document))
    for relative in checkpoint.other_files:
        shutil.copy(made / relative, source / relative)


def compare(options: argparse.Namespace, source: Path, out: Path) -> None:
    """Run every contender in its rounds and print a Markdown table."""
    contenders = list_contenders(options)
    sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
    plan = subprocess.run(
        [*OURS, "convert", str(source), str(out), "--dry-run", "--json"], check=True, capture_output=True
    )
    matching = json.loads(plan.stdout)["files"]["rewritten"]
    modules = len(json.loads(plan.stdout)["modules"])
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(max(contender.rounds for contender in contenders)):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            if number >= contender.rounds:
                continue
            command = [part.format(source=source, out=out) for part in contender.command]
            if number == 0 and contender.command[: len(OURS)] == tuple(OURS):
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                subprocess.run([*OURS, "verify", str(source), str(out)], check=True, stdout=subprocess.DEVNULL)
                shutil.rmtree(out)
            runs[contender.name].append(timed(command, source, options.cold))
            shutil.rmtree(out, ignore_errors=True)
    print(
        f"\n{sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards of at most {max(sizes) / 1e9:.2f} GB, {matching} of them "
        f"with a match, {modules} kv_b_proj; {options.workers} workers, cold: {options.cold}, "
        f"load {os.getloadavg()[1]:.1f}\n"
    )
    print(
        "| what | runs | seconds, median [range] | ratio to `cp -r` | CPU s | peak RSS MB |\n|---|---|---|---|---|---|"
    )
    base = statistics.median(run.seconds for run in runs["`cp -r`"])
    for name, done in runs.items():
        seconds = [run.seconds for run in done]
        middle = statistics.median(seconds)
        print(
            f"| {name} | {len(done)} | {middle:.1f} [{min(seconds):.1f}-{max(seconds):.1f}] | {middle / base:.2f} "
            f"| {statistics.median(run.cpu for run in done):.1f} | {max(run.resident_mb for run in done):.0f} |",
            flush=True,
        )


def list_contenders(options: argparse.Namespace) -> list[Contender]:
    link = "copy" if options.mode == "full" else "hard"
    convert = (*OURS, "convert", "{source}", "{out}", "--workers", str(options.workers), "--link", link)
    contenders = [
        Contender("`cp -r`", ("cp", "-r", "{source}", "{out}"), options.rounds),
        Contender(f"`convert --link {link}`", convert, options.rounds),
    ]
    if options.sidecar:
        contenders.append(
            Contender(f"`convert --link {link} --layout sidecar`", (*convert, "--layout", "sidecar"), options.rounds)
        )
    for peer in options.peers:
        python = options.llm_compressor if peer == "llm-compressor" else sys.executable
        contenders.append(Contender(peer, (python, str(PEERS), peer, "{source}", "{out}"), options.peer_rounds))
    return contenders


def timed(command: list[str], source: Path, cold: str) -> Run:
    """Run `command` and sync.

    :raises SystemExit: the command failed
    """
    os.sync()
    if cold == "all":
        Path("/proc/sys/vm/drop_caches").write_text("3")
    elif cold == "checkpoint":
        for path in source.iterdir():
            forget(path)
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # wait4, because its usage is that of this process alone
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    seconds = time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def forget(path: Path) -> None:
    """Drop the pages of one file, which has been synced."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
