"""The startup report: a table in the log of the first rank, and the same as JSON where a file is asked for."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weightprep.engines.sglang.hardware import AITER_REMEDY, AITER_VARIABLE, aiter_is_on
from weightprep.engines.sglang.metrics import export_layers
from weightprep.engines.sglang.modules import is_nextn_draft
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.runtime_check import RuntimeReport
from weightprep.errors import EngineError

__all__ = [
    "AS_BUILT",
    "REPORT_VARIABLE",
    "CanaryReport",
    "LayerReport",
    "Noise",
    "Startup",
    "ViolationReport",
    "check_destination",
    "log_report",
    "write_report",
]

logger = logging.getLogger(__name__)

# Names a file that the first rank writes the report to, as JSON.
REPORT_VARIABLE = "WEIGHTPREP_REPORT"
# the source of what weightprep did not prepare
AS_BUILT = "as sglang built it"

Noise = Literal["none", "finite", "not finite", "not measured"]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What one layer of this rank was given.

    :param precision: of the absorbed weights; "kept" where the option nextn is keep
    :param source: where the weights came from and how they were encoded: "online bf16", "sidecar fp8_tensor", or
        AS_BUILT
    :param path: the path that upstream's gates choose for the live tensors, joined with "+" where the matmuls differ
    :param sqnr_db: of the weights against those that they were made from, on some heads; None where `noise` is not
        finite, or none
    :param noise: of these weights: "not finite" where a value is NaN or infinite, or where there is no signal;
        "not measured" where nothing was prepared
    :param fast: whether both matmuls run in the weights' precision
    :param reason: what decided it
    """

    layer: int
    group: str
    precision: str
    source: str
    sqnr_db: float | None
    noise: Noise
    path: str
    fast: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ViolationReport:
    """One tensor of this rank that is not as its contract says, in the words of contracts.Violation."""

    layer: int
    group: str
    tensor: str
    found: str
    wanted: str
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What came of the canary.

    :param state: "off" by the option; "not run" where no layer keeps its contract, the weights are random or upstream's
        kernels cannot be called alone
    :param paths: those that passed
    :param left_out: layers without a canary, because they violate their contract
    """

    state: Literal["passed", "failed", "off", "not run"]
    paths: tuple[str, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Startup:
    """One load of `model` as the report tells it."""

    model: Any
    preparation: Preparation
    version: str
    layers: tuple[LayerReport, ...]
    violations: tuple[ViolationReport, ...]
    runtime: RuntimeReport


def log_report(startup: Startup) -> None:
    """Log the table of this pipeline stage and set the metrics.

    Only the first tensor parallel rank does: with DP attention every replica of the attention has the same layers.
    """
    if not _is_first_rank():
        return
    preparation, reports = startup.preparation, startup.layers
    name, target, recipe = type(startup.model).__name__, preparation.target, preparation.plan.recipe.name
    title = f"weightprep: {name} on {target}, sglang {startup.version}, recipe {recipe}"
    logger.info("\n".join([title, *_table(preparation, reports)]))
    if not aiter_is_on():
        logger.warning("weightprep: %s is off, and with it every kernel of aiter's: %s", AITER_VARIABLE, AITER_REMEDY)
    export_layers({path: sum(report.path == path for report in reports) for path in {r.path for r in reports}})


def write_report(startup: Startup, canary: CanaryReport) -> None:
    """Write the JSON file of this pipeline stage on its first rank, if one is wanted."""
    destination = os.environ.get(REPORT_VARIABLE)
    if not destination or not _is_first_rank():
        return
    from sglang.srt.distributed.parallel_state import get_pp_group

    document = {
        "schema": "weightprep.startup/1",
        "model": type(startup.model).__name__,
        "target": startup.preparation.target,
        "sglang": startup.version,
        "recipe": startup.preparation.plan.recipe.name,
        "runtime": asdict(startup.runtime),
        "canary": asdict(canary),
        "violations": [asdict(violation) for violation in startup.violations],
        "layers": [asdict(report) for report in startup.layers],
    }
    path = Path(destination)
    # the draft of a speculative server and each pipeline stage report too, in files of their own
    part = ".nextn" if is_nextn_draft(startup.model) else ""
    if (stages := get_pp_group()).world_size > 1:
        part = f".pp{stages.rank_in_group}{part}"
    path = path.with_name(f"{path.stem}{part}{path.suffix}")
    try:
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        logger.warning("weightprep: no report at %s: %s", path, error)


def _is_first_rank() -> bool:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return not get_tp_group().rank_in_group


def check_destination() -> None:
    """Before the load, whether a report can be written after it.

    :raises EngineError: it cannot
    """
    destination = os.environ.get(REPORT_VARIABLE)
    if not destination:
        return
    path = Path(destination)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EngineError(
            f"{REPORT_VARIABLE}={destination}",
            found="a file that cannot be written",
            wanted="a file in a directory that exists",
            remedy=f"create the directory, or unset {REPORT_VARIABLE}",
        )


def _table(preparation: Preparation, reports: tuple[LayerReport, ...]) -> list[str]:
    rows: dict[tuple[str, ...], list[LayerReport]] = {}
    for report in reports:
        speed = "" if report.fast else "slow: "
        key = (report.group, report.precision, report.source, report.path, speed + report.reason)
        rows.setdefault(key, []).append(report)
    totals = {group: sum(module.group == group for module in preparation.plan.modules) for group, *_ in rows}
    lines = [("layers", "", "precision", "source", "SQNR", "path", "reason")]
    lines += [
        (group, f"{len(layers)}/{totals[group] or len(layers)}", precision, source, _worst(layers), path, reason)
        for (group, precision, source, path, reason), layers in rows.items()
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    cells = ([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]] for line in lines)
    return ["  " + "  ".join(row) for row in cells]


def _worst(layers: list[LayerReport]) -> str:
    if layers[0].source == AS_BUILT:
        return ""
    if any(layer.noise == "not finite" for layer in layers):
        return "not finite"
    known = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
    return f"{min(known):.1f} dB" if known else "exact"
