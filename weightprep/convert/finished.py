"""Which files of a plan earlier runs have finished: what the journal says, if the file itself does not contradict it.

The header decides what a loader makes of every byte behind it. One of the right size and with other names, shapes or
offsets would become part of the result, so the file is written again. Headers only are read.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

from weightprep.checkpoint.json_file import open_regular
from weightprep.convert.inline import shard_header
from weightprep.convert.journal import Entry, journaled_files
from weightprep.convert.partial import tree_of
from weightprep.convert.plan import ConversionPlan, ShardJob
from weightprep.errors import CheckpointError

__all__ = ["finished_files"]

_PIECE_BYTES = 2**20


def finished_files(plan: ConversionPlan) -> dict[str, Entry]:
    """Every file of `plan` that a journal calls finished and that is there in full size and with the planned header."""
    tree = tree_of(plan.options.partial)
    entries = journaled_files(plan.options.partial)
    jobs = [job for job in plan.jobs if job.name in entries and entries[job.name].nbytes == job.nbytes]
    return {job.name: entries[job.name] for job in jobs if _is_headed(tree / job.name, plan, job)}


def _is_headed(path: Path, plan: ConversionPlan, job: ShardJob) -> bool:
    """Whether the file at `path` begins with the header that `job` gives it."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if job.rewritten:
                header = shard_header(job.tensors, job.metadata or {})
                return _same_start(file, io.BytesIO(header), len(header))
            try:
                source = job.source.open("rb")
            except OSError:
                # A disk that is away for a moment: nothing to compare with, and nothing finished is thrown away.
                return True
            with source:
                if os.path.sameopenfile(file.fileno(), source.fileno()):
                    return True
                return _same_start(file, source, plan.checkpoint.shards[job.name].data_start)
    except (OSError, CheckpointError):
        return False


def _same_start(file: BinaryIO, other: BinaryIO, nbytes: int) -> bool:
    left = nbytes
    while left > 0:
        piece = file.read(min(left, _PIECE_BYTES))
        if not piece or other.read(len(piece)) != piece:
            return False
        left -= len(piece)
    return True
