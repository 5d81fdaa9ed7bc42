"""How long a conversion will take: a short sample of the very copy that it does, between the same two disks.

The sample goes into a file without a name, which the kernel drops with the descriptor: nothing can be left behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container
from dataclasses import dataclass

from weightprep.checkpoint.copying import copy_range
from weightprep.checkpoint.json_file import open_regular
from weightprep.convert.options import nearest_existing
from weightprep.convert.plan import ConversionPlan
from weightprep.convert.remaining import needed_bytes

__all__ = ["Estimate", "estimate"]

# Large enough to get past what a disk takes into its own memory at once, and a second at most on slow ones.
_SAMPLE_BYTES = 64 * 2**20
_STEP_BYTES = 8 * 2**20
_SAMPLE_SECONDS = 1.0
# Not even a sample where there is hardly any room.
_LEAST_FREE_BYTES = 4 * _SAMPLE_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was measured, and what follows for the whole.

    :param seconds: `nbytes` at the rate of the sample; arithmetic and small files are not in it
    :param nbytes: bytes that the conversion has yet to write; what it links costs nothing
    :param sample_bytes: bytes that were copied, and synced, to measure
    """

    seconds: float
    nbytes: int
    sample_bytes: int
    sample_seconds: float


def estimate(plan: ConversionPlan, done: Container[str]) -> Estimate | None:
    """The time that `plan` takes on these disks as busy as they are now; None where that cannot be tried.

    A sample of the largest shard is copied into a file without a name at the destination's file system.

    :param done: files that are finished already
    """
    needed = needed_bytes(plan, done)
    directory = nearest_existing(plan.options.partial.parent)
    largest = max(plan.checkpoint.shards.values(), key=lambda header: header.file_size)
    status = os.statvfs(directory)
    if status.f_bavail * status.f_frsize < _LEAST_FREE_BYTES:
        return None
    source = open_regular(largest.path)
    try:
        # Not every file system has files without a name.
        target = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        os.close(source)
        return None
    try:
        # Of a shard that was read a moment ago the page cache would tell another disk's speed.
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        copied, began = 0, time.perf_counter()
        while copied < min(_SAMPLE_BYTES, largest.file_size) and time.perf_counter() - began < _SAMPLE_SECONDS:
            step = min(_STEP_BYTES, largest.file_size - copied)
            copy_range(source, target, source_offset=copied, target_offset=copied, nbytes=step)
            copied += step
        os.fsync(target)
        seconds = time.perf_counter() - began
    except (OSError, EOFError):
        return None
    finally:
        os.close(target)
        os.close(source)
    return Estimate(needed * seconds / copied, needed, copied, seconds)
