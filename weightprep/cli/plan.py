"""A plan for people and for --json: what becomes of each module and file, what it needs and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from weightprep.cli.output import print_json, print_lines, say
from weightprep.convert.options import Layout

if TYPE_CHECKING:
    from weightprep.convert.plan import ConversionPlan
    from weightprep.convert.remaining import Space

__all__ = ["plan_document", "plan_lines", "show_plan", "unmatched_lines"]

_SHOWN = 3


def plan_lines(plan: ConversionPlan) -> list[str]:
    """The plan for people."""
    options = plan.options
    lines = [
        f"recipe {plan.model.recipe.name}, layout {options.layout.value}: {len(plan.modules)} module(s) to convert"
    ]
    for job in plan.modules:
        if job.overrides is not None:
            lines.append(f"  overrides the checkpoint's exclude entry {job.overrides!r} for {job.source.module}")
    lines += [f"  {line}" for line in unmatched_lines(plan.unmatched_excludes)]
    for module in plan.passed:
        lines.append(f"  passes {module.source.module}: {module.reason}")
    lines += [f"  {name}: {why}" for name, why in _unclaimed(plan)]
    for absent in plan.absent:
        lines.append(f"  not in this checkpoint: {absent.source}")
    for path in plan.left_behind:
        lines.append(f"  leaves {path} behind")
    if options.layout is Layout.INLINE and any("scale" in job.outputs for job in plan.modules):
        lines.append(
            "  inline: the prefill path reads the quantized kv_b_proj too; --layout sidecar keeps the original"
        )
    return lines


def unmatched_lines(excludes: Sequence[str]) -> list[str]:
    """What to say of `excludes`, entries that name nothing in the checkpoint: a line, or none."""
    if not excludes:
        return []
    more = ", ..." if len(excludes) > _SHOWN else ""
    return [
        f"exclude entries that name nothing in this checkpoint, {len(excludes)}: {', '.join(excludes[:_SHOWN])}{more}"
    ]


def plan_document(plan: ConversionPlan, room: Space) -> dict[str, Any]:
    """The plan for --json."""
    fates: dict[str, int] = {}
    for fate in plan.fates:
        fates[fate.fate.value] = fates.get(fate.fate.value, 0) + 1
    return {
        "source": str(plan.options.source),
        "destination": str(plan.options.destination),
        "destination_path": str(plan.options.destination.resolve()),
        "recipe": plan.model.recipe.name,
        "recipe_hash": plan.model.recipe_hash,
        "layout": plan.options.layout.value,
        "modules": [
            {
                "module": job.source.module,
                "layer": job.plan.layer,
                "group": job.plan.group,
                "from": job.source.encoded.encoding.value,
                "to": job.target_encoding,
                "overrides_exclude": job.overrides,
            }
            for job in plan.modules
        ],
        "passed": [
            *({"module": module.source.module, "reason": module.reason} for module in plan.passed),
            *({"module": name, "reason": why} for name, why in _unclaimed(plan)),
        ],
        "absent": [module.source for module in plan.absent],
        "left_behind": [str(path) for path in plan.left_behind],
        "unmatched_excludes": list(plan.unmatched_excludes),
        "tensors": fates,
        "files": {
            "rewritten": sum(job.rewritten for job in plan.jobs),
            "whole": sum(not job.rewritten for job in plan.jobs),
            "other": len(plan.copies) + len(plan.texts),
        },
        "bytes": sum(job.nbytes for job in plan.jobs),
        "needed_bytes": room.wanted,
    }


def _unclaimed(plan: ConversionPlan) -> list[tuple[str, str]]:
    """Each module that no layer group names, and what to say of it."""
    from weightprep.convert.coverage import why_unclaimed

    return [(name, why_unclaimed(plan.model)) for name in plan.unclaimed]


def _duration(seconds: float) -> str:
    """To the second, above two minutes to the minute, above two hours to the tenth of an hour."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_plan(plan: ConversionPlan, *, as_json: bool) -> None:
    """What --dry-run prints, and what a conversion without anything to do prints."""
    from weightprep.convert.estimate import estimate
    from weightprep.convert.options import Part
    from weightprep.convert.outlook import nothing_reason
    from weightprep.convert.remaining import finished_by, jobs_of, space

    done = finished_by(plan)
    room = space(plan, done)
    mine = plan.jobs if plan.options.finish else jobs_of(plan, plan.options.part or Part(1, 1))
    resumed = sum(job.name in done for job in mine)
    document = plan_document(plan, room)
    expected = estimate(plan, done) if plan.modules and plan.stamps else None
    if as_json:
        state = "planned" if plan.modules else "nothing_to_convert"
        reason = None if plan.modules else nothing_reason(plan.model, plan.passed)
        estimated = None if expected is None else asdict(expected)
        print_json(
            "convert",
            {
                "state": state,
                "reason": reason,
                **document,
                "free_bytes": room.free,
                "resumed_files": resumed,
                "estimate": estimated,
            },
        )
        return
    if not plan.modules:
        print_lines(f"nothing to convert: {nothing_reason(plan.model, plan.passed)}")
        for name, why in _unclaimed(plan):
            print_lines(f"  {name}: {why}")
        print_lines(*(f"  {line}" for line in unmatched_lines(plan.unmatched_excludes)))
        say(f"no destination is written; {plan.options.source} can be used as it is: `weightprep inspect` tells what")
        say("  serving it with --load-format weightprep adds")
        return
    for line in plan_lines(plan):
        print_lines(line)
    files = document["files"]
    print_lines(
        f"  {files['rewritten']} file(s) written anew, {files['whole']} linked or copied, {files['other']} small ones"
    )
    if resumed:
        print_lines(f"  goes on where an earlier run stopped: {resumed} of {len(mine)} file(s) are finished")
    needed = f"{room.wanted / 1e9:.2f} GB at the destination"
    free = f"{room.free / 1e9:.2f} GB are free there" + ("" if room.suffices else ", so convert would not begin")
    if not plan.stamps:
        print_lines(
            f"  downloads {sum(header.file_size for header in plan.checkpoint.shards.values()) / 1e9:.2f} GB first"
        )
        print_lines(f"  needs at most {needed}; {free}")
    else:
        print_lines(f"  needs {needed}; {free}")
    if expected is not None:
        rate = expected.sample_bytes / expected.sample_seconds / 1e6
        print_lines(
            f"  about {_duration(expected.seconds)} at {rate:.0f} MB/s, the rate at which a sample of "
            f"{expected.sample_bytes / 1e6:.0f} MB was copied and synced just now"
        )
    for number, module in enumerate(document["modules"]):
        if number == 5 and len(document["modules"]) > 6:
            print_lines(f"  ... and {len(document['modules']) - number} more (--json lists all)")
            break
        print_lines(f"  {module['module']}: {module['from']} -> {module['to']}")
    say("dry run: nothing was written")
