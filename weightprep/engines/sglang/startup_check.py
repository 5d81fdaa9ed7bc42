"""Says, once after every load, which path each layer's absorbed matmuls will take, and why; or fails.

The gates that choose a kernel are comparisons of dtypes at run time. A layer that misses one runs slower and says
nothing, so it is said here: one table for the model, all violations together.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from weightprep.contracts import Place, Prediction, Violation, predict, raise_violations
from weightprep.engines.sglang.canary import Sample, run_canary
from weightprep.engines.sglang.kernels import server_kernels
from weightprep.engines.sglang.modules import LiveModule, live_modules
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.report import LayerReport, log_report
from weightprep.engines.sglang.versions import KNOWN, installed_version

__all__ = ["check_startup"]

logger = logging.getLogger(__name__)


def check_startup(
    model: Any, preparation: Preparation, *, weights_are_random: bool, is_reload: bool
) -> tuple[LayerReport, ...]:
    """Check every prepared layer of `model` against its contract, and log the table on the first rank.

    :param weights_are_random: a dummy load: broken values are worth a warning, not a failure
    :param is_reload: the table has been logged before
    :raises ModelContractError: with all violations, unless on_violation is warn
    """
    modules = live_modules(model, preparation.plan)
    version = str(installed_version() or KNOWN[-1])
    predictions = [predict(preparation.target, version, _attributes(module.owner)) for module in modules]
    reports = tuple(_report(*pair, preparation) for pair in zip(modules, predictions, strict=True))
    violations = [fault for pair in zip(modules, predictions, strict=True) for fault in _violations(*pair, preparation)]
    if not is_reload and all(module.rank == 0 for module in modules):
        log_report(model, preparation, version, reports)
    if violations and (weights_are_random or preparation.options.on_violation == "warn"):
        _warn(violations)
    else:
        raise_violations(violations)
        if preparation.options.canary == "on" and not (is_reload or weights_are_random):
            _run_canary(modules, predictions, preparation)
    return reports


def _run_canary(modules: list[LiveModule], predictions: list[Prediction], preparation: Preparation) -> None:
    kernels = server_kernels(preparation.options.runtime)
    if kernels is None:
        logger.info("weightprep: no canary: upstream's kernels of this device cannot be called alone")
        return
    samples = [
        Sample(
            where=f"layer {module.plan.layer} ({module.plan.group})",
            path=prediction.path,
            w_kc=module.owner.w_kc,
            w_vc=module.owner.w_vc,
            w_scale=module.owner.w_scale,
            w_scale_k=module.owner.w_scale_k,
            w_scale_v=module.owner.w_scale_v,
        )
        for module, prediction in zip(modules, predictions, strict=True)
        if module.plan.source in preparation.origins
    ]
    logger.info("weightprep: canary passed for %d distinct kernel path(s)", run_canary(samples, kernels))


def _attributes(owner: Any) -> dict[str, str]:
    """What the gates compare, of a live attention."""
    found = {"w_scale": "tensor" if isinstance(owner.w_scale, torch.Tensor) else "float"}
    for name in ("w_kc", "w_vc", "w_scale_k", "w_scale_v"):
        value = getattr(owner, name, None)
        if isinstance(value, torch.Tensor):
            found[name] = str(value.dtype).removeprefix("torch.")
    return found


def _report(module: LiveModule, prediction: Prediction, preparation: Preparation) -> LayerReport:
    origin = preparation.origins.get(module.plan.source)
    return LayerReport(
        layer=module.plan.layer,
        group=module.plan.group,
        precision=module.plan.precision,
        source=f"{origin.route} {origin.encoding}" if origin else "as sglang built it",
        path=prediction.path,
        fast=prediction.fast,
        reason=prediction.reason,
    )


def _violations(module: LiveModule, prediction: Prediction, preparation: Preparation) -> list[Violation]:
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
            consequence=f"path '{prediction.path}' is taken: {prediction.reason}",
            cause=_cause(module, preparation),
            remedy="run `weightprep doctor` and `weightprep inspect`, or serve with on_violation=warn",
        )
        tensor = getattr(module.owner, role)
        if isinstance(tensor, torch.Tensor):
            found.extend(spec.check(tensor, place))
        else:
            found.append(_absent(place, tensor, str(spec.dtype).removeprefix("torch.")))
    return found


def _cause(module: LiveModule, preparation: Preparation) -> str:
    if module.plan.source not in preparation.origins:
        return "sglang's loader did not pass this layer through post_load_weights, or holds it in a form of its own"
    return f"recipe {preparation.plan.recipe.name} made this of {module.plan.source}"


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


def _warn(violations: list[Violation]) -> None:
    """Each kind of violation once, with the layers that have it."""
    kinds: dict[tuple[str, str], list[Violation]] = {}
    for violation in violations:
        kinds.setdefault((violation.tensor, violation.found), []).append(violation)
    for same in kinds.values():
        more = f" (and {len(same) - 1} more layers)" if len(same) > 1 else ""
        logger.warning("weightprep: %s%s", same[0], more)
