"""Says, once after every load, which path each layer's absorbed matmuls will take, and why; or fails.

The gates that choose a kernel are comparisons of dtypes at run time. A layer that misses one runs slower and says
nothing, so it is said here: one table for the model, all violations together.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weightprep.contracts import Place, Violation, raise_violations
from weightprep.engines.sglang.modules import LiveModule, live_modules
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.versions import installed_version

__all__ = ["REPORT_VARIABLE", "LayerReport", "check_startup", "inspect_layers"]

logger = logging.getLogger(__name__)

# Names a file that the first rank writes the report to, as JSON.
REPORT_VARIABLE = "WEIGHTPREP_REPORT"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What one layer of this rank was given.

    :param source: where the weights came from and how they were encoded: "online bf16", "sidecar fp8_tensor", "as
        sglang built it"
    :param path: the kernel path that upstream's gates will choose
    :param reason: why another path than the contract's, empty where it is the contract's
    """

    layer: int
    group: str
    precision: str
    source: str
    path: str
    reason: str


def check_startup(model: Any, preparation: Preparation, *, weights_are_random: bool) -> tuple[LayerReport, ...]:
    """Check every prepared layer of `model` against its contract, and log the table on the first rank.

    :param weights_are_random: a dummy load: broken values are worth a warning, not a failure
    :raises ModelContractError: with all violations, unless on_violation is warn
    """
    modules = live_modules(model, preparation.plan)
    violations = [violation for module in modules for violation in _violations(module, preparation)]
    reports = inspect_layers(modules, preparation, violations)
    if all(module.rank == 0 for module in modules):
        _log(model, preparation, reports)
    if violations and (weights_are_random or preparation.options.on_violation == "warn"):
        _warn(violations)
    else:
        raise_violations(violations)
    return reports


def inspect_layers(
    modules: Iterable[LiveModule], preparation: Preparation, violations: Iterable[Violation]
) -> tuple[LayerReport, ...]:
    """One report for each of `modules`."""
    broken = {violation.layer: f"{violation.tensor}: {violation.found}" for violation in reversed(list(violations))}
    reports = []
    for module in modules:
        origin = preparation.origins.get(module.plan.source)
        reason = broken.get(_layer(module), "")
        reports.append(
            LayerReport(
                layer=module.plan.layer,
                group=module.plan.group,
                precision=module.plan.precision,
                source=f"{origin.route} {origin.encoding}" if origin else "as sglang built it",
                path="bf16 or slower" if reason else module.plan.contract,
                reason=reason,
            )
        )
    return tuple(reports)


def _violations(module: LiveModule, preparation: Preparation) -> list[Violation]:
    plan = preparation.plan
    heads = module.local_heads(plan.dims["nope"] + plan.dims["v"])
    found: list[Violation] = []
    for role, spec in plan.contract(module.plan.contract, heads, preparation.target).items():
        place = Place(
            layer=module.plan.layer,
            group=module.plan.group,
            tensor=f"self_attn.{role}",
            path=module.plan.contract,
            target=preparation.target,
            consequence="the gate misses and the slow path runs",
            cause=f"recipe {plan.recipe.name} did not get this tensor into the form of its contract",
            remedy="run `weightprep doctor` and `weightprep inspect`, or serve with on_violation=warn",
        )
        tensor = getattr(module.owner, role)
        if isinstance(tensor, torch.Tensor):
            found.extend(spec.check(tensor, place))
        else:
            found.append(_absent(place, tensor, str(spec.dtype).removeprefix("torch.")))
    return found


def _absent(place: Place, value: object, wanted: str) -> Violation:
    return Violation(
        layer=f"layer {place.layer} ({place.group})",
        tensor=place.tensor,
        found=f"is {value!r}",
        wanted=f"a {wanted} tensor",
        path=f"'{place.path}' on {place.target}",
        consequence=place.consequence,
        cause=place.cause,
        remedy=place.remedy,
    )


def _layer(module: LiveModule) -> str:
    return f"layer {module.plan.layer} ({module.plan.group})"


def _log(model: Any, preparation: Preparation, reports: tuple[LayerReport, ...]) -> None:
    version = str(installed_version())
    name, target, recipe = type(model).__name__, preparation.target, preparation.plan.recipe.name
    title = f"weightprep: {name} on {target}, sglang {version}, recipe {recipe}"
    logger.info("\n".join([title, *_table(preparation, reports)]))
    destination = os.environ.get(REPORT_VARIABLE)
    if destination:
        document = {
            "schema": "weightprep.startup/1",
            "model": type(model).__name__,
            "target": preparation.target,
            "sglang": version,
            "recipe": preparation.plan.recipe.name,
            "layers": [asdict(report) for report in reports],
        }
        path = Path(destination)
        # the draft of a speculative server reports too, in a file of its own
        if any(report.group == "nextn" for report in reports):
            path = path.with_name(f"{path.stem}.nextn{path.suffix}")
        path.write_text(json.dumps(document, indent=2) + "\n")


def _table(preparation: Preparation, reports: tuple[LayerReport, ...]) -> list[str]:
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for report in reports:
        key = (report.group, report.precision, report.source, report.path, report.reason or "as its contract wants")
        rows.setdefault(key, []).append(report.layer)
    totals = {group: sum(module.group == group for module in preparation.plan.modules) for group, *_ in rows}
    lines = [("layers", "", "precision", "source", "path", "reason")]
    for (group, precision, source, path, reason), layers in rows.items():
        lines.append((group, f"{len(layers)}/{totals[group]}", precision, source, path, reason))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]


def _warn(violations: list[Violation]) -> None:
    """Each kind of violation once, with the layers that have it."""
    kinds: dict[tuple[str, str], list[Violation]] = {}
    for violation in violations:
        kinds.setdefault((violation.tensor, violation.found), []).append(violation)
    for same in kinds.values():
        more = f" (and {len(same) - 1} more layers)" if len(same) > 1 else ""
        logger.warning("weightprep: %s%s", same[0], more)
