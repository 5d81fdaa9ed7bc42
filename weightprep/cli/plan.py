"""A plan for people and for --json: what becomes of each module and file, what it needs and how long it may take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from weightprep.cli.output import print_json, printable, say
from weightprep.convert.options import Layout

if TYPE_CHECKING:
    from weightprep.convert.plan import ConversionPlan

__all__ = ["plan_document", "plan_lines", "show_plan"]


def plan_lines(plan: ConversionPlan) -> list[str]:
    """The plan for people."""
    options = plan.options
    lines = [
        f"recipe {plan.model.recipe.name}, layout {options.layout.value}: {len(plan.modules)} module(s) to convert"
    ]
    for job in plan.modules:
        if job.overrides is not None:
            lines.append(f"  overrides the checkpoint's exclude entry {job.overrides!r} for {job.source.module}")
    if plan.unmatched_excludes:
        more = ", ..." if len(plan.unmatched_excludes) > 3 else ""
        shown = ", ".join(plan.unmatched_excludes[:3]) + more
        lines.append(f"  exclude entries that name nothing in this checkpoint, {len(plan.unmatched_excludes)}: {shown}")
    for module in plan.passed:
        lines.append(f"  passes {module.source.module}: {module.reason}")
    lines += [f"  {name}: {why}" for name, why in _unclaimed(plan)]
    for absent in plan.absent:
        lines.append(f"  not in this checkpoint: {absent.source}")
    for path in plan.left_behind:
        lines.append(f"  leaves {path} behind")
    if options.layout is Layout.INLINE and plan.modules:
        lines.append(
            "  inline: the prefill path reads the quantized kv_b_proj too; --layout sidecar keeps the original"
        )
    return lines


def plan_document(plan: ConversionPlan) -> dict[str, Any]:
    """The plan for --json."""
    from weightprep.convert.execute import needed_bytes

    fates: dict[str, int] = {}
    for fate in plan.fates:
        fates[fate.fate.value] = fates.get(fate.fate.value, 0) + 1
    return {
        "source": str(plan.options.source),
        "destination": str(plan.options.destination),
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
        "needed_bytes": needed_bytes(plan),
    }


def _unclaimed(plan: ConversionPlan) -> list[tuple[str, str]]:
    """Each module that no layer group names, and what to say of it."""
    from weightprep.convert.coverage import why_unclaimed

    return [(name, why_unclaimed(plan.model)) for name in plan.unclaimed]


def _nothing_reason(plan: ConversionPlan) -> str:
    if plan.model.recipe.nothing_to_convert is not None:
        return plan.model.recipe.nothing_to_convert
    if plan.passed:
        return f"{len(plan.passed)} module(s) are {plan.passed[0].reason}"
    return "the recipe names no module of this checkpoint"


def _duration(seconds: float) -> str:
    """To the second, above two minutes to the minute, above two hours to the tenth of an hour."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_plan(plan: ConversionPlan, *, as_json: bool) -> None:
    """What --dry-run prints, and what a conversion without anything to do prints."""
    from weightprep.convert.estimate import estimate

    document = plan_document(plan)
    expected = estimate(plan) if plan.modules and plan.stamps else None
    if as_json:
        state = "planned" if plan.modules else "nothing_to_convert"
        reason = None if plan.modules else _nothing_reason(plan)
        estimated = None if expected is None else asdict(expected)
        print_json("convert", {"state": state, "reason": reason, **document, "estimate": estimated})
        return
    if not plan.modules:
        print(f"nothing to convert: {_nothing_reason(plan)}")
        for name, why in _unclaimed(plan):
            print(printable(f"  {name}: {why}"))
        say(f"no destination is written; {plan.options.source} can be used as it is")
        return
    for line in plan_lines(plan):
        print(printable(line))
    files = document["files"]
    print(
        f"  {files['rewritten']} file(s) written anew, {files['whole']} linked or copied, {files['other']} small ones"
    )
    needed = document["needed_bytes"] / 1e9
    if not plan.stamps:
        print(f"  downloads {sum(header.file_size for header in plan.checkpoint.shards.values()) / 1e9:.2f} GB first")
        print(f"  needs at most {needed:.2f} GB at the destination")
    else:
        print(f"  needs {needed:.2f} GB at the destination")
    if expected is not None:
        rate = expected.sample_bytes / expected.sample_seconds / 1e6
        print(
            f"  about {_duration(expected.seconds)} at {rate:.0f} MB/s, the rate at which a sample of "
            f"{expected.sample_bytes / 1e6:.0f} MB was copied and synced just now"
        )
    for number, module in enumerate(document["modules"]):
        if number == 5 and len(document["modules"]) > 6:
            print(f"  ... and {len(document['modules']) - number} more (--json lists all)")
            break
        print(f"  {module['module']}: {module['from']} -> {module['to']}")
    say("dry run: nothing was written")
