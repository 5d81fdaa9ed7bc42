"""The startup report: a table in the log of the first rank, and the same as JSON where a file is asked for."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weightprep.engines.sglang.hardware import AITER_REMEDY, AITER_VARIABLE, aiter_is_on
from weightprep.engines.sglang.metrics import export_layers
from weightprep.engines.sglang.modules import is_nextn_draft
from weightprep.engines.sglang.prepare import Preparation
from weightprep.errors import EngineError

__all__ = ["AS_BUILT", "REPORT_VARIABLE", "LayerReport", "check_destination", "log_report"]

logger = logging.getLogger(__name__)

# Names a file that the first rank writes the report to, as JSON.
REPORT_VARIABLE = "WEIGHTPREP_REPORT"
# the source of what weightprep did not prepare
AS_BUILT = "as sglang built it"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What one layer of this rank was given.

    :param precision: of the absorbed weights; "kept" where the option nextn is keep
    :param source: where the weights came from and how they were encoded: "online bf16", "sidecar fp8_tensor", or
        AS_BUILT
    :param path: the path that upstream's gates choose for the live tensors, joined with "+" where the matmuls differ
    :param sqnr_db: of the weights against those that they were made from, on some heads; None where there is no noise
        or nothing was prepared
    :param fast: whether both matmuls run in the weights' precision
    :param reason: what decided it
    """

    layer: int
    group: str
    precision: str
    source: str
    sqnr_db: float | None
    path: str
    fast: bool
    reason: str


def log_report(model: Any, preparation: Preparation, version: str, reports: tuple[LayerReport, ...]) -> None:
    """Log the table of this pipeline stage; write the JSON file and the metrics if they are wanted.

    Only the first tensor parallel rank does: with DP attention every replica of the attention has the same layers.
    """
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

    if get_tp_group().rank_in_group:
        return
    name, target, recipe = type(model).__name__, preparation.target, preparation.plan.recipe.name
    title = f"weightprep: {name} on {target}, sglang {version}, recipe {recipe}"
    logger.info("\n".join([title, *_table(preparation, reports)]))
    if not aiter_is_on():
        logger.warning("weightprep: %s is off, and with it every kernel of aiter's: %s", AITER_VARIABLE, AITER_REMEDY)
    export_layers({path: sum(report.path == path for report in reports) for path in {r.path for r in reports}})
    destination = os.environ.get(REPORT_VARIABLE)
    if destination:
        layers = [asdict(report) for report in reports]
        head = {"schema": "weightprep.startup/1", "model": name, "target": target, "sglang": version, "recipe": recipe}
        path = Path(destination)
        # the draft of a speculative server and each pipeline stage report too, in files of their own
        part = ".nextn" if is_nextn_draft(model) else ""
        if (stages := get_pp_group()).world_size > 1:
            part = f".pp{stages.rank_in_group}{part}"
        path = path.with_name(f"{path.stem}{part}{path.suffix}")
        try:
            path.write_text(json.dumps(head | {"layers": layers}, indent=2) + "\n")
        except OSError as error:
            logger.warning("weightprep: no report at %s: %s", path, error)


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
    known = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
    return f"{min(known):.1f} dB" if known else "exact"
