"""`weightprep convert`: plan, show or execute, and say what to do next."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightprep.cli.next_steps import next_steps
from weightprep.cli.output import DEFAULT_WORKERS, command, print_json, print_lines, say
from weightprep.cli.plan import plan_document, plan_lines, show_plan
from weightprep.convert.options import ConvertOptions, Executor, Layout, LinkMode, Part
from weightprep.errors import RecipeError, WeightprepError

if TYPE_CHECKING:
    from weightprep.checkpoint.repository import Checkpoint
    from weightprep.convert.execute import Result
    from weightprep.convert.plan import ConversionPlan

__all__ = ["convert", "parse_precision"]


class NextN(str, Enum):
    """For typer, which knows no Literal."""

    CONVERT = "convert"
    KEEP = "keep"


@command
def convert(
    src: Annotated[Path, typer.Argument(help="The checkpoint directory to convert, or org/name\\[@revision].")],
    dst: Annotated[Path, typer.Argument(help="The directory to write; with --layout sidecar it may be SRC itself.")],
    recipe: Annotated[str | None, typer.Option(help="Recipe name or YAML file; default: by architecture.")] = None,
    layout: Annotated[Layout, typer.Option(help="Into the shards, or into a subfolder beside them.")] = Layout.INLINE,
    link: Annotated[LinkMode, typer.Option(help="How untouched shards come over.")] = LinkMode.AUTO,
    precision: Annotated[
        str | None, typer.Option(help="fp8, mxfp4, bf16 or bf16+fp8; or by layer group: decoder=fp8,nextn=bf16.")
    ] = None,
    nextn: Annotated[NextN, typer.Option(help="What to do with the NextN layer's weights.")] = NextN.CONVERT,
    requantize: Annotated[bool, typer.Option("--requantize", help="Store fp8 sources again under one scale.")] = False,
    allow_quality_loss: Annotated[
        bool, typer.Option("--allow-quality-loss", help="Go below the recipe's quality floor, and record it.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Shards in flight at once (Ray: per node); default: cores, at most 4.")
    ] = DEFAULT_WORKERS,
    executor: Annotated[
        Executor, typer.Option(help="Threads here, or the running Ray cluster (shared file system).")
    ] = Executor.LOCAL,
    part: Annotated[str | None, typer.Option(metavar="i/n", help="Do part i of n; --finish completes them.")] = None,
    finish: Annotated[bool, typer.Option("--finish", help="Complete a conversion that was done in parts.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at DST.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Write a checkpoint whose weights have the form that the fast kernels gate on.

    Killed or interrupted, it leaves no DST, and the same command goes on where it stopped.

    Examples:

      weightprep convert zai-org/GLM-5.2 GLM-5.2-prepared --dry-run

      weightprep convert GLM-5.2 GLM-5.2-prepared --link hard

      weightprep convert GLM-5.2 GLM-5.2 --layout sidecar
    """
    from weightprep.checkpoint.hub_source import locate, parse_hub_source
    from weightprep.convert.execute import execute
    from weightprep.convert.planner import make_plan
    from weightprep.convert.remaining import finished_by, left_to_write, space

    options = ConvertOptions(
        source=src,
        destination=dst,
        recipe=recipe,
        layout=layout,
        link=link,
        precision=parse_precision(precision),
        nextn=nextn.value,
        requantize=requantize,
        allow_quality_loss=allow_quality_loss,
        workers=workers,
        executor=executor,
        part=_parse_part(part),
        finish=finish,
        overwrite=overwrite,
    )
    if part is not None and finish:
        raise _bad_part(f"{part!r} and --finish")
    hub = parse_hub_source(src) is not None
    plan = make_plan(options, _headers(src) if hub else None)
    if hub and plan.modules and not dry_run:
        # Whatever headers allow to refuse was refused before the download.
        plan = make_plan(dataclasses.replace(options, source=locate(src)))
    if dry_run or not plan.modules:
        show_plan(plan, as_json=json)
        return None
    from weightprep.cli.progress import progress

    for line in plan_lines(plan):
        say(line)
    began = time.monotonic()
    done = finished_by(plan)
    document = plan_document(plan, space(plan, done))
    try:
        with progress(left_to_write(plan, done)) as shown:
            result = execute(plan, shown)
    except WeightprepError:
        if not finish and (kept := finished_by(plan)):
            say(f"{plan.options.partial}: {len(kept)} of {len(plan.jobs)} file(s) are finished and stay:")
            say("  the same command goes on from there; to begin again, remove that directory")
        raise
    if json:
        _print_result(document, result, time.monotonic() - began)
    else:
        _show_result(plan, result)
    return None


def _headers(src: Path) -> Checkpoint:
    # The hub's libraries take longer to import than a small conversion to run.
    from weightprep.checkpoint.hub import open_headers

    return open_headers(src)


def parse_precision(text: str | None) -> str | dict[str, str] | None:
    """ "fp8", or "decoder=fp8,nextn=bf16" as a mapping.

    :raises RecipeError: neither
    """
    if text is None or "=" not in text:
        return text
    pairs = [item.partition("=") for item in text.split(",")]
    groups = [group.strip() for group, _, _ in pairs]
    if len(set(groups)) < len(groups) or any(not (group and separator and name) for group, separator, name in pairs):
        raise RecipeError(
            "--precision",
            found=repr(text),
            wanted="fp8, or group=precision pairs with commas between them, each group once",
            remedy="for example: --precision decoder=fp8,nextn=bf16",
        )
    return {group.strip(): name.strip() for group, _, name in pairs}


def _parse_part(text: str | None) -> Part | None:
    if text is None:
        return None
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return Part(int(index), int(count))
    raise _bad_part(repr(text))


def _bad_part(found: str) -> RecipeError:
    return RecipeError(
        "--part",
        found=found,
        wanted="i/n with i from 1 to n, or --finish alone",
        remedy="give every job of the array its own i, and run --finish once after all of them",
    )


def _print_result(document: Mapping[str, Any], result: Result, seconds: float) -> None:
    print_json(
        "convert",
        {
            "state": "done" if result.committed else "part_done",
            "reason": None,
            **document,
            "seconds": round(seconds, 3),
            "resumed_files": result.resumed,
            "placed": dict(result.placed),
            "results": [record.model_dump(mode="json") for record in result.modules],
        },
    )


def _show_result(plan: ConversionPlan, result: Result) -> None:
    if not result.committed:
        count = plan.options.part.count if plan.options.part else 1
        print_lines(f"part done: {len(result.modules)} module(s) converted; after all {count} run --finish")
        return
    from weightprep.convert.quality import judged_db

    errors = [record.quality.relative_error for record in result.modules]
    judged = [db for record in result.modules if (db := judged_db(record.quality)) is not None]
    worst = f", worst head {min(judged):.1f} dB SQNR" if judged else ""
    print_lines(
        f"{result.output}: {len(errors)} module(s) converted, relative error {min(errors):.4f}-{max(errors):.4f}{worst}"
    )
    if result.placed.get("hard"):
        say(f"{result.placed['hard']} shard(s) are hard links: writing into one in place changes the source as well;")
        say("  --link copy, or reflink where the file system has it, shares nothing")
    for line in next_steps(plan):
        say(line)
