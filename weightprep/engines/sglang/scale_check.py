"""At startup on gfx95: asks the installed aiter what its quantizations do when sglang wants transposed scales, and puts
the call sites on the path without a transpose.

sglang takes the answer on trust: it passes `transpose_scale=True` and views the result as column-major. A producer that
ignores the parameter then gives wrong numbers without an error, and one that lacks it fails at the first request.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightprep.engines.sglang.scale_hooks import CLAMP, FLATTEN, GROUP, RMS, ScaleSite, hook_scale_sites
from weightprep.errors import EngineError
from weightprep.runtime.scale_probe import (
    ScaleProducer,
    TransposeScale,
    clamp_arguments,
    group_arguments,
    probe_producer,
    rms_arguments,
)

__all__ = ["ProducerReport", "check_scales", "probe_producers", "scale_producers", "start_scales"]

logger = logging.getLogger(__name__)

Arguments = Callable[[torch.Tensor], tuple[tuple[object, ...], Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class ProducerReport:
    """What one quantization of aiter does with transposed scales.

    :param producer: None where it does something unknown
    """

    name: str
    found: str
    producer: ScaleProducer | None

    @property
    def sound(self) -> bool:
        """Whether sglang's column-major view of the result is right."""
        return self.producer is not None and self.producer.behaviour is not TransposeScale.ROW_ONLY


def check_scales(runtime: str) -> tuple[ScaleSite, ...]:
    """:func:`start_scales` where sglang transposes scales: gfx95 with aiter and ROCm 7.2 or later."""
    from sglang.srt.models.deepseek_common import utils

    if not getattr(utils, "_use_aiter_bpreshuffle_gfx95", False):
        return ()
    return start_scales(scale_producers(), torch.device("cuda"), runtime)


def start_scales(
    producers: Mapping[str, tuple[Callable[..., Any], Arguments]], device: torch.device | str, runtime: str
) -> tuple[ScaleSite, ...]:
    """Probe `producers`, hook the call sites of those that are understood, and log both; returns the call sites.

    :param runtime: the plugin's option; "upstream" hooks nothing, and only what sglang would get wrong is told
    """
    reports = probe_producers(producers, device)
    known = {report.name: report.producer for report in reports if report.producer is not None}
    hooked = () if runtime == "upstream" else hook_scale_sites(known)
    mended = {site.producer for site in hooked}
    for report in reports:
        if report.sound or report.name in mended & {FLATTEN, GROUP}:
            logger.info("weightprep: %s with transposed scales returns %s", report.name, report.found)
        else:
            logger.warning(
                "weightprep: %s with transposed scales: %s. sglang would read its scales wrong, or fail, on paths that "
                "quantize with it: install an aiter that this sglang release names",
                report.name,
                report.found,
            )
    if hooked:
        sites = ", ".join(f"{name} in {count}" for name, count in sorted(Counter(s.producer for s in hooked).items()))
        logger.info("weightprep: group scales column-major without a copy: %s module(s)", sites)
    else:
        reason = "the option runtime is upstream" if runtime == "upstream" else "this sglang has none of the call sites"
        logger.info("weightprep: group scales as upstream: %s", reason)
    return hooked


def scale_producers() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """The producers of the installed aiter that sglang asks for transposed scales; those that it lacks are left out."""
    group = {"group_size": 128, "dtype_quant": torch.float8_e4m3fn}
    flat = group_arguments(**group)
    wanted: dict[str, tuple[str, Arguments]] = {
        RMS: ("aiter.ops.triton.fused_fp8_quant", rms_arguments(**group)),
        FLATTEN: ("aiter.ops.triton.fused_fp8_quant", lambda x: ((x[:, None], *flat(x)[0][1:]), flat(x)[1])),
        GROUP: ("aiter.ops.quant", group_arguments(quant_dtype=torch.float8_e4m3fn, group_size=128)),
        CLAMP: ("aiter.ops.triton.fusions.fused_clamp_act_mul", clamp_arguments(dtype_quant=torch.float8_e4m3fn)),
    }
    found = {}
    for name, (module, arguments) in wanted.items():
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:
            continue
        if function is not None:
            found[name] = (getattr(function, "weightprep_original", function), arguments)
    return found


def probe_producers(
    producers: Mapping[str, tuple[Callable[..., Any], Arguments]], device: torch.device | str
) -> tuple[ProducerReport, ...]:
    """Probe each of `producers` once."""
    reports = []
    for name, (function, arguments) in producers.items():
        try:
            producer = probe_producer(function, arguments, device=device)
            reports.append(ProducerReport(name, producer.behaviour.value, producer))
        except EngineError as error:
            reports.append(ProducerReport(name, error.found, None))
    return tuple(reports)
