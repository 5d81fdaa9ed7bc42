"""Carries a plan out: files in parallel, index, config and manifest last, then one rename.

At every moment the destination either does not exist or is complete. What an interrupted run has finished is kept
beside it, in the partial directory, and the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightprep import __version__
from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST, Manifest, ModuleRecord
from weightprep.checkpoint.writer import fsync_directory
from weightprep.convert.files import FileRunner, Progress, check_unchanged
from weightprep.convert.finished import finished_files
from weightprep.convert.journal import Entry, Journal, claim, identity_of, journaled_files, parts_of
from weightprep.convert.options import Executor, Layout, LinkMode, Part
from weightprep.convert.partial import commit, put_back, temporary_of, tree_of
from weightprep.convert.placing import place_file, replace_file, sync_file, write_bytes
from weightprep.convert.plan import ConversionPlan
from weightprep.convert.quality import describe, is_below, judged_db
from weightprep.convert.ray_executor import RayRunner, ray_cluster
from weightprep.convert.remaining import jobs_of, space
from weightprep.errors import CheckpointError, QualityError, WeightprepError

__all__ = ["Result", "execute"]

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Result:
    """What a run did.

    :param committed: whether the destination now exists; not so for one part of a job array
    :param resumed: files that an earlier run had finished
    :param placed: how files came over ("hard", "reflink", "copy", "rewritten") -> how many, in this run
    :param modules: records of the converted modules, in the recipe's order; of this part only where not committed
    """

    output: Path
    committed: bool
    resumed: int
    placed: Mapping[str, int]
    modules: tuple[ModuleRecord, ...]


def execute(plan: ConversionPlan, progress: Progress) -> Result:
    """Do the plan's part of the work, and commit where that completes it.

    :raises CheckpointError: the disk is too small, the source changed, a value cannot be converted, another process
        is at work, it was begun in another number of parts, or reading or writing failed
    :raises QualityError: a module is below its floor, unless that is allowed
    :raises KeyboardInterrupt: interrupted; what is finished is kept
    """
    options, partial = plan.options, plan.options.partial
    part = options.part or Part(1, parts_of(partial) if options.finish else 1)
    _check_parts(plan, part.count)
    summary = {"source": str(options.source), "destination": str(options.destination), "files": len(plan.jobs)}
    try:
        # A cluster that does not answer leaves nothing behind.
        with ray_cluster() if options.executor is Executor.RAY else contextlib.nullcontext():
            claim(options, plan.identity, part.count, summary)
            with Journal(partial, part) as journal:
                return _locked(plan, part, journal, progress)
    except OSError as error:
        raise CheckpointError(
            error.filename or partial,
            found=error.strerror or type(error).__name__,
            wanted="to read and write the whole conversion",
            remedy="mend the disk or free some space, and run the same command again: it goes on where it stopped",
        ) from error


def _locked(plan: ConversionPlan, part: Part, journal: Journal, progress: Progress) -> Result:
    options, partial = plan.options, plan.options.partial
    put_back(options)
    done = finished_files(plan)
    mine = jobs_of(plan, part)
    todo = [] if options.finish else [job for job in mine if job.name not in done]
    try:
        # Another run may have come to its last rename since the plan was made: that is told before the work, not after.
        options.check_destination()
        _check_space(plan, done)
        runner = (RayRunner if options.executor is Executor.RAY else FileRunner)(plan, journal, progress)
        runner.run(todo)
        done |= runner.entries
        is_part = options.part is not None and not options.finish
        records = _records(plan, {job.name: done[job.name] for job in mine} if is_part else done)
        below = _check_quality(plan, records)
        if is_part:
            return Result(options.output, False, len(mine) - len(todo), runner.placed, records)
        _check_complete(plan, done)
        _write_rest(plan, records, below)
    except WeightprepError:
        # Whatever failed, a finished file is not thrown away, nor one that cannot be read just now: a disk can be
        # mended, a floor be waived. Parts of a job array leave each other's directory alone.
        if part.count == 1 and not journaled_files(partial):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    commit(options)
    return Result(options.output, True, len(plan.jobs) - len(todo), runner.placed, records)


def _check_parts(plan: ConversionPlan, count: int) -> None:
    """Of the same conversion in another number of parts, say what is left to do instead of calling it another one.

    :raises CheckpointError: what is begun is this conversion, not in `count` parts
    """
    options, partial = plan.options, plan.options.partial
    if options.overwrite or not tree_of(partial).exists() or identity_of(partial) != plan.identity:
        return
    if (begun := parts_of(partial)) == count:
        return
    done = finished_files(plan)
    left = [
        f"--part {index}/{begun}"
        for index in range(1, begun + 1)
        if any(job.name not in done for job in jobs_of(plan, Part(index, begun)))
    ]
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    if begun == 1:
        found, remedy = "this conversion without --part", "run it without --part: it goes on where it stopped"
    else:
        found = f"a conversion in {begun} parts ({begun - len(left)}/{begun} done)"
        remedy = f"run {', '.join(left[:_SHOWN])}{more}, then --finish" if left else "run --finish"
    raise CheckpointError(
        partial,
        found=found,
        wanted=f"this conversion in {count} parts" if count > 1 else "this conversion without --part",
        remedy=f"{remedy}; --overwrite begins again",
    )


def _check_space(plan: ConversionPlan, done: Mapping[str, Entry]) -> None:
    room = space(plan, done)
    if not room.suffices:
        raise CheckpointError(
            plan.options.output,
            found=f"{room.free:,} bytes free",
            wanted=f"{room.wanted:,} bytes",
            remedy="free some space, choose another disk, or let untouched shards be linked (--link auto, same disk)",
        )


def _records(plan: ConversionPlan, done: Mapping[str, Entry]) -> tuple[ModuleRecord, ...]:
    by_module = {record.module: record for entry in done.values() for record in entry.modules}
    return tuple(by_module[m.source.module] for m in plan.modules if m.source.module in by_module)


def _check_quality(plan: ConversionPlan, records: Sequence[ModuleRecord]) -> tuple[str, ...]:
    """The modules below their recipe's floor.

    :raises QualityError: there are some, and that was not allowed
    """
    floors = {job.source.module: job.plan.min_sqnr_db for job in plan.modules}
    below = [record for record in records if is_below(record.quality, floors[record.module])]
    if below and not plan.options.allow_quality_loss:
        worst = min(below, key=lambda record: -math.inf if (db := judged_db(record.quality)) is None else db)
        raise QualityError(
            worst.module,
            found=f"{describe(worst.quality)} ({len(below)} module(s) below the floor)",
            wanted=f"at least {floors[worst.module]:g} dB",
            remedy="keep this precision off the layer, or convert all the same with --allow-quality-loss (recorded)",
        )
    return tuple(record.module for record in below)


def _check_complete(plan: ConversionPlan, done: Mapping[str, Entry]) -> None:
    missing = [job.name for job in plan.jobs if job.name not in done]
    if missing:
        raise CheckpointError(
            plan.options.partial,
            found=f"{len(missing)} of {len(plan.jobs)} files not done, {missing[0]} first",
            wanted="every part of the job array finished",
            remedy="run the missing parts (--part i/n), then --finish again"
            if parts_of(plan.options.partial) > 1
            else "run the same command without --finish: it was begun without --part",
        )


def _write_rest(plan: ConversionPlan, records: tuple[ModuleRecord, ...], below: tuple[str, ...]) -> None:
    """Everything that is no shard: other files first, config and index after them, the manifest last."""
    options, tree = plan.options, tree_of(plan.options.partial)
    for relative, source in plan.copies.items():
        _copy_small(plan, source, relative)
    for relative, text in plan.texts.items():
        write_bytes(tree / relative, text, temporary_of(options.partial, relative))
    manifest = Manifest(
        tool_version=__version__,
        layout=options.layout.value,
        recipe=plan.model.recipe.name,
        recipe_hash=plan.model.recipe_hash,
        precision=plan.precision,
        nextn=options.nextn,
        requantize=options.requantize,
        quality_loss_allowed=bool(below),
        below_floor=below,
        dropped=plan.dropped,
        modules=records,
    ).to_json()
    if options.layout is Layout.SIDECAR:
        name = SIDECAR_MANIFEST.name if options.in_place else SIDECAR_MANIFEST
        write_bytes(tree / name, manifest, temporary_of(options.partial, name))
    if not options.in_place:
        write_bytes(tree / MANIFEST_NAME, manifest, temporary_of(options.partial, MANIFEST_NAME))
    for directory, _, _ in os.walk(tree):
        fsync_directory(Path(directory))


def _copy_small(plan: ConversionPlan, source: Path, relative: Path) -> None:
    """Never a link: tokenizer and template files are edited in place by their users."""
    target = tree_of(plan.options.partial) / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(plan.options.partial, relative)
    temporary.unlink(missing_ok=True)
    check_unchanged([plan.stamps[source]])
    place_file(source, temporary, LinkMode.COPY, lambda _: None)
    sync_file(temporary)
    replace_file(temporary, target)
