"""Says, once after the first load, which path each layer's absorbed matmuls will take, and why; or fails.

The gates that choose a kernel are comparisons of dtypes at run time. A layer that misses one runs slower and says
nothing, so it is said here: one table for the model, all violations together.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

from weightprep.contracts import Prediction
from weightprep.engines.sglang.canary import Sample, run_canary
from weightprep.engines.sglang.contract_check import CheckedLayer, check_layers, judge, predicted_path
from weightprep.engines.sglang.kernels import server_kernels
from weightprep.engines.sglang.modules import kept_attentions, live_modules
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
    runtime: RuntimeReport,
) -> None:
    """Check every prepared layer of `model` against its contract; log the table and write the JSON on the first rank.

    :param weights_are_random: a dummy load: broken values are worth a warning, not a failure
    :param runtime: whose absorbed products run, for the JSON
    :raises ModelContractError: with all violations, unless on_violation is warn
    """
    layers = check_layers(live_modules(model, preparation.plan), preparation)
    reports = tuple(_report(layer, preparation) for layer in layers)
    reports += tuple(
        _report_kept(layer, predicted_path(owner, preparation))
        for layer, owner in kept_attentions(model, preparation.plan)
    )
    violations = tuple(itertools.chain.from_iterable(map(_report_violations, layers)))
    startup = Startup(model, preparation, str(installed_version() or KNOWN[-1]), reports, violations, runtime)
    log_report(startup)
    canary = CanaryReport("off" if preparation.options.canary == "off" else "not run")
    try:
        judge(layers, is_lenient=weights_are_random or preparation.options.on_violation == "warn")
        if preparation.options.canary == "on" and not weights_are_random:
            sound = [layer for layer in layers if not layer.violations]
            canary = CanaryReport("failed", left_out=len(layers) - len(sound))
            canary = _run_canary(sound, canary.left_out, preparation)
    finally:
        write_report(startup, canary)


def _run_canary(layers: list[CheckedLayer], left_out: int, preparation: Preparation) -> CanaryReport:
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
            where=f"layer {layer.module.plan.layer} ({layer.module.plan.group})",
            path=layer.prediction.path,
            w_kc=layer.module.owner.w_kc,
            w_vc=layer.module.owner.w_vc,
            w_scale=layer.module.owner.w_scale,
            w_scale_k=layer.module.owner.w_scale_k,
            w_scale_v=layer.module.owner.w_scale_v,
        )
        for layer in layers
        if layer.module.plan.source in preparation.origins
    ]
    logger.info("weightprep: canary passed for %d distinct kernel path(s)", run_canary(samples, kernels))
    return CanaryReport("passed", tuple(sorted({sample.path for sample in samples})), left_out)


def _report(layer: CheckedLayer, preparation: Preparation) -> LayerReport:
    plan, prediction, sqnr = layer.module.plan, layer.prediction, layer.sqnr_db
    origin = preparation.origins.get(plan.source)
    return LayerReport(
        layer=plan.layer,
        group=plan.group,
        precision=plan.precision,
        source=f"{origin.route} {origin.encoding}" if origin else AS_BUILT,
        sqnr_db=round(sqnr, 2) if math.isfinite(sqnr) else None,
        noise=_noise(sqnr) if origin else "not measured",
        path=prediction.path,
        fast=prediction.fast,
        reason=prediction.reason,
    )


def _report_violations(layer: CheckedLayer) -> list[ViolationReport]:
    plan = layer.module.plan
    return [
        ViolationReport(plan.layer, plan.group, fault.tensor, fault.found, fault.wanted, fault.cause, fault.remedy)
        for fault in layer.violations
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
