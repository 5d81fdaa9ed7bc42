"""What a run has still to do: which files earlier runs left finished, and what has to be free for the others.

One answer for the check before a run, for its progress, for `--dry-run` and for the estimate.
"""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass

from weightprep.convert.finished import finished_files
from weightprep.convert.journal import Entry, identity_of, parts_of
from weightprep.convert.options import Part, nearest_existing
from weightprep.convert.placing import can_link
from weightprep.convert.plan import ConversionPlan, ShardJob

__all__ = ["Space", "finished_by", "jobs_of", "left_to_write", "needed_bytes", "space"]

# Left free for the file system's own bookkeeping.
_SPARE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the destination's file system, in bytes.

    :param wanted: what must be free for a run to begin
    :param free: what is free now
    """

    wanted: int
    free: int

    @property
    def suffices(self) -> bool:
        return self.wanted <= self.free


def jobs_of(plan: ConversionPlan, part: Part) -> list[ShardJob]:
    """The files that `part` of a job array writes."""
    return [job for number, job in enumerate(plan.jobs) if number % part.count == part.index - 1]


def finished_by(plan: ConversionPlan) -> dict[str, Entry]:
    """The files that a run of `plan` need not write again, because a run of this very conversion has finished them.

    :raises CheckpointError: the plan of what was begun cannot be read
    """
    options = plan.options
    if identity_of(options.partial) != plan.identity:
        return {}
    count = options.part.count if options.part else 1
    return finished_files(plan) if options.finish or parts_of(options.partial) == count else {}


def left_to_write(plan: ConversionPlan, done: Container[str]) -> int:
    """Bytes of the files that a run of `plan` does, less those of the files `done`."""
    if plan.options.finish:
        return 0
    return sum(job.nbytes for job in jobs_of(plan, plan.options.part or Part(1, 1)) if job.name not in done)


def needed_bytes(plan: ConversionPlan, done: Container[str]) -> int:
    """Bytes that reach the disk until the conversion is complete, the files `done` being so; at most that, of a source
    that is on the hub. What is linked takes none; other parts of a job array fill the same disk, so theirs count.
    """
    if not plan.stamps:
        return sum(job.nbytes for job in plan.jobs) + sum(map(len, plan.texts.values()))
    directory = nearest_existing(plan.options.output.parent)
    link = plan.options.link
    todo = [job for job in plan.jobs if job.name not in done]
    shards = sum(job.nbytes for job in todo if job.rewritten or not can_link(job.source, directory, link))
    return shards + sum(path.stat().st_size for path in plan.copies.values()) + sum(map(len, plan.texts.values()))


def space(plan: ConversionPlan, done: Container[str]) -> Space:
    """Whether there is room for what is left when the files `done` are finished."""
    status = os.statvfs(nearest_existing(plan.options.partial))
    return Space(needed_bytes(plan, done) + _SPARE_BYTES, status.f_bavail * status.f_frsize)
