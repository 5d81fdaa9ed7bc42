"""At startup on gfx95: asks the installed aiter what its quantizations do when sglang wants their scales transposed.

sglang takes the answer on trust: it passes `transpose_scale=True` and views the result as column-major. A producer that
ignores the parameter then gives wrong numbers without an error, and one that lacks it fails at the first request.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightprep.errors import EngineError
from weightprep.runtime.scale_probe import TransposeScale, group_arguments, probe_producer, rms_arguments

__all__ = ["ProducerReport", "check_scales", "report_scale_producers", "scale_producers"]

logger = logging.getLogger(__name__)

Arguments = Callable[[torch.Tensor], tuple[tuple[object, ...], Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class ProducerReport:
    """What one quantization of aiter does with transposed scales.

    :param sound: whether sglang's column-major view of the result is right
    """

    name: str
    sound: bool
    found: str


def check_scales() -> tuple[ProducerReport, ...]:
    """Probe the installed aiter where sglang transposes scales: gfx95 with aiter and ROCm 7.2 or later."""
    from sglang.srt.models.deepseek_common import utils

    if not getattr(utils, "_use_aiter_bpreshuffle_gfx95", False):
        return ()
    return report_scale_producers(scale_producers(), torch.device("cuda"))


def scale_producers() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """The producers of the installed aiter that sglang asks for transposed scales; those that it lacks are left out."""
    group = {"group_size": 128, "dtype_quant": torch.float8_e4m3fn}
    flat = group_arguments(**group)
    wanted: dict[str, tuple[str, Arguments]] = {
        "fused_rms_fp8_group_quant": ("aiter.ops.triton.fused_fp8_quant", rms_arguments(**group)),
        "fused_flatten_fp8_group_quant": (
            "aiter.ops.triton.fused_fp8_quant",
            lambda x: ((x[:, None], *flat(x)[0][1:]), flat(x)[1]),
        ),
        "per_group_quant_hip": ("aiter.ops.quant", group_arguments(quant_dtype=torch.float8_e4m3fn, group_size=128)),
    }
    found = {}
    for name, (module, arguments) in wanted.items():
        function = getattr(importlib.import_module(module), name, None)
        if function is not None:
            found[f"{module}.{name}"] = (function, arguments)
    return found


def report_scale_producers(
    producers: Mapping[str, tuple[Callable[..., Any], Arguments]], device: torch.device | str
) -> tuple[ProducerReport, ...]:
    """Probe each of `producers` once and log what it does; a warning where sglang's view of it would be wrong."""
    reports = []
    for name, (function, arguments) in producers.items():
        try:
            behaviour = probe_producer(function, arguments, device=device).behaviour
            report = ProducerReport(name, behaviour is not TransposeScale.ROW_ONLY, behaviour.value)
        except EngineError as error:
            report = ProducerReport(name, False, error.found)
        reports.append(report)
        if report.sound:
            logger.info("weightprep: %s with transposed scales returns %s", name, report.found)
        else:
            logger.warning(
                "weightprep: %s with transposed scales: %s. sglang would read its scales wrong, or fail, on paths that "
                "quantize with it: install an aiter that this sglang release names",
                name,
                report.found,
            )
    return tuple(reports)
