"""Holds the layers of a live model against their contract, on all ranks that share their weights together.

What only one rank's rows have wrong has to stop all of them. A rank that refuses an update alone leaves the others to
serve a model that is half old and half new, or to wait for it in their next collective.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightprep.contracts import Prediction, Violation, predict, raise_violations
from weightprep.engines.sglang.agreement import agree_on_maxima, attention_group
from weightprep.engines.sglang.hardware import aiter_is_on
from weightprep.engines.sglang.layer_violations import find_violations, violation_on_rank
from weightprep.engines.sglang.modules import LiveModule
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.versions import gates_version

__all__ = ["CheckedLayer", "check_layers", "judge", "predicted_path"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedLayer:
    """What was found of one layer.

    :param sqnr_db: of the worst head on any rank, see quality_check
    :param violations: this rank's; where there are none but another rank has some, one that names that rank
    """

    module: LiveModule
    prediction: Prediction
    sqnr_db: float
    violations: tuple[Violation, ...]


def check_layers(modules: Sequence[LiveModule], preparation: Preparation) -> list[CheckedLayer]:
    """Check `modules`; all ranks must call it, with the same ones. One collective, where weights are spread."""
    checked = []
    for module in modules:
        prediction = predicted_path(module.owner, preparation)
        found = tuple(find_violations(module, prediction, preparation))
        checked.append(CheckedLayer(module, prediction, preparation.sqnr_db(module.plan.source), found))
    if not any(module.shards > 1 for module in modules):
        return checked
    rank = int(attention_group().rank_in_group)
    mine = torch.tensor([[rank if layer.violations else -1.0, -layer.sqnr_db] for layer in checked])
    return [
        replace(layer, sqnr_db=-sqnr, violations=layer.violations or _elsewhere(layer, int(culprit), preparation))
        for layer, (culprit, sqnr) in zip(checked, agree_on_maxima([mine])[0].tolist(), strict=True)
    ]


def _elsewhere(layer: CheckedLayer, rank: int, preparation: Preparation) -> tuple[Violation, ...]:
    return () if rank < 0 else (violation_on_rank(rank, layer.module, layer.prediction, preparation),)


def judge(checked: Sequence[CheckedLayer], *, is_lenient: bool) -> None:
    """Say what the layers violate, and which of them are all zeros.

    :param is_lenient: violations are worth a warning each, not a failure
    :raises ModelContractError: with all violations, unless `is_lenient`
    """
    violations = list(itertools.chain.from_iterable(layer.violations for layer in checked))
    _warn_of_zeros([layer.module for layer in checked])
    if is_lenient:
        _warn(violations)
    else:
        raise_violations(violations)


def predicted_path(owner: Any, preparation: Preparation) -> Prediction:
    """The path that upstream's gates choose for a live attention."""
    compared = {
        "w_scale": "tensor" if isinstance(owner.w_scale, torch.Tensor) else "float",
        "aiter": "on" if aiter_is_on() else "off",
    }
    for name in ("w_kc", "w_vc", "w_scale_k", "w_scale_v"):
        value = getattr(owner, name, None)
        if isinstance(value, torch.Tensor):
            compared[name] = str(value.dtype).removeprefix("torch.")
    return predict(preparation.target, str(gates_version()), compared)


def _warn_of_zeros(modules: Iterable[LiveModule]) -> None:
    """A weight of zeros, as dummy loads of some kinds have, is not a violation, but never meant."""
    zeros = [m.plan.layer for m in modules if _is_zero(m.owner.w_kc) and _is_zero(m.owner.w_vc)]
    if zeros:
        more = f" and {len(zeros) - 1} more" if len(zeros) > 1 else ""
        logger.warning("weightprep: kv_b_proj of layer %d%s is all zeros", zeros[0], more)


def _is_zero(weight: object) -> bool:
    if not isinstance(weight, torch.Tensor):
        return False
    # all but the sign of two packed e2m1 numbers, or of one e4m3 number
    mask = 0x77 if weight.dtype is torch.uint8 else 0x7F
    # nearly every weight is known by its first head
    for heads in (weight[:1], weight):
        if bool((heads.view(torch.uint8) & mask if heads.element_size() == 1 else heads).any()):
            return False
    return True


def _warn(violations: Iterable[Violation]) -> None:
    """Each kind of violation once, by the layer that has it worst, with the number of those that have it."""
    kinds: dict[tuple[str, str, str], list[Violation]] = {}
    for violation in violations:
        kinds.setdefault(violation.kind, []).append(violation)
    for same in kinds.values():
        worst = min(same, key=lambda violation: 0.0 if violation.figure is None else violation.figure)
        more = f" (and {len(same) - 1} more layers{'' if worst.figure is None else ', none worse'})"
        logger.warning("weightprep: %s%s", worst, more if len(same) > 1 else "")
