"""Says, once after every load, which path each layer's absorbed matmuls will take, and why; or fails.

The gates that choose a kernel are comparisons of dtypes at run time. A layer that misses one runs slower and says
nothing, so it is said here: one table for the model, all violations together.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import torch

from weightprep.contracts import Prediction, Violation, predict, raise_violations
from weightprep.engines.sglang.canary import Sample, run_canary
from weightprep.engines.sglang.hardware import aiter_is_on
from weightprep.engines.sglang.kernels import server_kernels
from weightprep.engines.sglang.layer_violations import find_violations
from weightprep.engines.sglang.modules import LiveModule, kept_attentions, live_modules
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.report import (
    AS_BUILT,
    CanaryReport,
    LayerReport,
    Noise,
    Startup,
    ViolationReport,
    log_report,
    write_report,
)
from weightprep.engines.sglang.runtime_check import RuntimeReport
from weightprep.engines.sglang.versions import KNOWN, installed_version
from weightprep.recipe import NEXTN_GROUP

__all__ = ["check_startup"]

logger = logging.getLogger(__name__)


def check_startup(
    model: Any,
    preparation: Preparation,
    *,
    weights_are_random: bool,
    is_reload: bool,
    runtime: RuntimeReport | None = None,
) -> tuple[LayerReport, ...]:
    """Check every prepared layer of `model` against its contract; log the table and write the JSON on the first rank.

    :param weights_are_random: a dummy load: broken values are worth a warning, not a failure
    :param is_reload: the table has been logged before
    :param runtime: whose absorbed products run, for the JSON
    :raises ModelContractError: with all violations, unless on_violation is warn
    """
    modules = live_modules(model, preparation.plan)
    version = str(installed_version() or KNOWN[-1])
    predictions = [predict(preparation.target, version, _attributes(module.owner)) for module in modules]
    layers = list(zip(modules, predictions, strict=True))
    reports = tuple(_report(*layer, preparation) for layer in layers)
    reports += tuple(
        _report_kept(layer, predict(preparation.target, version, _attributes(owner)))
        for layer, owner in kept_attentions(model, preparation.plan)
    )
    faults = [find_violations(*layer, preparation) for layer in layers]
    violations = [fault for found in faults for fault in found]
    found_here = (_report_violation(*pair) for pair in zip(modules, faults, strict=True))
    startup = Startup(model, preparation, version, reports, tuple(itertools.chain(*found_here)), runtime)
    if not is_reload:
        log_report(startup)
    _warn_of_zeros(modules)
    canary = CanaryReport("off" if preparation.options.canary == "off" else "not run")
    try:
        if violations and (weights_are_random or preparation.options.on_violation == "warn"):
            _warn(violations)
        else:
            raise_violations(violations)
        if preparation.options.canary == "on" and not (is_reload or weights_are_random):
            sound = [layer for layer, found in zip(layers, faults, strict=True) if not found]
            canary = CanaryReport("failed", left_out=len(layers) - len(sound))
            canary = _run_canary(sound, canary.left_out, preparation)
    finally:
        if not is_reload:
            write_report(startup, canary)
    return reports


def _run_canary(layers: list[tuple[LiveModule, Prediction]], left_out: int, preparation: Preparation) -> CanaryReport:
    if left_out:
        logger.warning("weightprep: no canary for %d layer(s) that violate their contract", left_out)
    if not layers:
        return CanaryReport("not run", left_out=left_out)
    kernels = server_kernels(preparation.options.runtime)
    if kernels is None:
        logger.info("weightprep: no canary: upstream's kernels of this device cannot be called alone")
        return CanaryReport("not run", left_out=left_out)
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
        for module, prediction in layers
        if module.plan.source in preparation.origins
    ]
    logger.info("weightprep: canary passed for %d distinct kernel path(s)", run_canary(samples, kernels))
    return CanaryReport("passed", tuple(sorted({sample.path for sample in samples})), left_out)


def _attributes(owner: Any) -> dict[str, str]:
    """What the gates compare, of a live attention."""
    found = {
        "w_scale": "tensor" if isinstance(owner.w_scale, torch.Tensor) else "float",
        "aiter": "on" if aiter_is_on() else "off",
    }
    for name in ("w_kc", "w_vc", "w_scale_k", "w_scale_v"):
        value = getattr(owner, name, None)
        if isinstance(value, torch.Tensor):
            found[name] = str(value.dtype).removeprefix("torch.")
    return found


def _report(module: LiveModule, prediction: Prediction, preparation: Preparation) -> LayerReport:
    origin = preparation.origins.get(module.plan.source)
    sqnr = preparation.sqnr_db(module.plan.source)
    return LayerReport(
        layer=module.plan.layer,
        group=module.plan.group,
        precision=module.plan.precision,
        source=f"{origin.route} {origin.encoding}" if origin else AS_BUILT,
        sqnr_db=round(sqnr, 2) if math.isfinite(sqnr) else None,
        noise=_noise(sqnr) if origin else "not measured",
        path=prediction.path,
        fast=prediction.fast,
        reason=prediction.reason,
    )


def _report_violation(module: LiveModule, found: list[Violation]) -> list[ViolationReport]:
    plan = module.plan
    return [
        ViolationReport(plan.layer, plan.group, fault.tensor, fault.found, fault.wanted, fault.cause, fault.remedy)
        for fault in found
    ]


def _noise(sqnr: float) -> Noise:
    if math.isfinite(sqnr):
        return "finite"
    return "none" if sqnr > 0 else "not finite"


def _report_kept(layer: int, prediction: Prediction) -> LayerReport:
    return LayerReport(
        layer=layer,
        group=NEXTN_GROUP,
        precision="kept",
        source=AS_BUILT,
        sqnr_db=None,
        noise="not measured",
        path=prediction.path,
        fast=prediction.fast,
        reason=f"nextn is keep; {prediction.reason}",
    )


def _warn_of_zeros(modules: list[LiveModule]) -> None:
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


def _warn(violations: list[Violation]) -> None:
    """Each kind of violation once, with the layers that have it."""
    kinds: dict[tuple[str, str], list[Violation]] = {}
    for violation in violations:
        kinds.setdefault((violation.tensor, violation.found), []).append(violation)
    for same in kinds.values():
        more = f" (and {len(same) - 1} more layers)" if len(same) > 1 else ""
        logger.warning("weightprep: %s%s", same[0], more)
