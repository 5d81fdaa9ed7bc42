"""The sidecar layout: the checkpoint stays as it is, and the converted tensors go into files of a subfolder beside it.

One sidecar file per source shard that holds a converted weight, under the shard's own name: the unit of work stays
the shard, and a reader of the file knows where its tensors came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from weightprep.checkpoint.repository import Checkpoint
from weightprep.convert.inline import shard_size
from weightprep.convert.options import SIDECAR_DIR
from weightprep.convert.plan import ModuleJob, OutputTensor, ShardJob

__all__ = ["sidecar_jobs"]

_METADATA = {"format": "pt"}


def sidecar_jobs(checkpoint: Checkpoint, modules: Sequence[ModuleJob], *, in_place: bool) -> tuple[ShardJob, ...]:
    """The source's shards as they are, unless the sidecar is added `in_place`, and the sidecar files."""
    jobs = [] if in_place else [ShardJob(n, header.path, header.file_size) for n, header in checkpoint.shards.items()]
    folder = PurePosixPath("" if in_place else SIDECAR_DIR)
    for shard, header in checkpoint.shards.items():
        here = tuple(module for module in modules if module.source.weight.shard == shard)
        if not here:
            continue
        tensors = tuple(
            OutputTensor(info, module=module.source.module, role=role)
            for module in here
            for role, info in module.outputs.items()
        )
        size = shard_size(tensors, _METADATA)
        jobs.append(ShardJob(str(folder / shard), header.path, size, tensors, _METADATA, here))
    return tuple(jobs)
