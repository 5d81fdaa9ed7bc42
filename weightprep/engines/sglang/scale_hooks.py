"""Has aiter's quantizations write their scales where gfx95's GEMM reads them, at the call sites of sglang's models.

From 0.5.15 on every such call site either transposes the scale in a kernel of its own (`materialize_bpreshuffle_*`) or
asks for transposed bytes and views them as column-major:

    release            transposes in a kernel                                             views
    0.5.15, 0.5.18     all call sites but DeepSeek-V4's norm                              DeepSeek-V4's norm
    0.5.20             the norms in communicator, forward_mla_rocm and forward_mha_rocm   the others
    0.5.22 and later   none                                                               all

Both accept a scale that lies column-major behind strides that say so: the transpose of such a tensor is contiguous, so
sglang's own copy of it copies nothing, and the view is what it was. So the producers' names are rebound in the modules
that call them, to the same kernels with `transpose_scale=True`; values and scales are the same bits. The definition in
aiter stays as it is, since other callers read row-major. 0.5.12 transposes inside its linear layer and is left alone,
as is the fused all-reduce, whose kernel is HIP's own.

Where the installed aiter has no column-major output, weightprep's producer takes the place of two of its quantizations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightprep.runtime import witness
from weightprep.runtime.flatten import flatten_quant_fp8
from weightprep.runtime.rms_quant import quantize_groups
from weightprep.runtime.scale_layout import GroupScaleLayout
from weightprep.runtime.scale_probe import ScaleProducer, TransposeScale

__all__ = ["CLAMP", "FLATTEN", "GROUP", "MATERIALIZE", "RMS", "SITES", "ScaleSite", "hook_scale_sites"]

RMS, FLATTEN, GROUP, CLAMP = (
    "fused_rms_fp8_group_quant",
    "fused_flatten_fp8_group_quant",
    "per_group_quant_hip",
    "fused_clamp_act_mul",
)
_METHODS = "sglang.srt.models.deepseek_common.attention_forward_methods"
_UTILS = "sglang.srt.layers.quantization.fp8_utils"
MATERIALIZE = f"{_UTILS}.materialize_bpreshuffle_fp8_scale"


@dataclass(frozen=True, slots=True)
class ScaleSite:
    """A module that calls one of aiter's quantizations.

    :param name: under which `module` has it
    :param producer: which of aiter's it is
    """

    module: str
    name: str
    producer: str


SITES = (
    ScaleSite("sglang.srt.layers.communicator", RMS, RMS),
    ScaleSite("sglang.srt.layers.layer_boundary.residual.add_norm", RMS, RMS),
    ScaleSite(f"{_METHODS}.forward_mla", RMS, RMS),
    ScaleSite(f"{_METHODS}.forward_mla", FLATTEN, FLATTEN),
    ScaleSite(f"{_METHODS}.forward_mla_rocm", RMS, RMS),
    ScaleSite(f"{_METHODS}.forward_mla_rocm", FLATTEN, FLATTEN),
    ScaleSite(f"{_METHODS}.forward_mha", RMS, RMS),
    ScaleSite(f"{_METHODS}.forward_mha_rocm", RMS, RMS),
    ScaleSite("sglang.srt.models.deepseek_v4", RMS, RMS),
    ScaleSite(_UTILS, "aiter_per1x128_quant", GROUP),
    # sglang imports it in the call, so its home is the place to rebind; nothing else calls it
    ScaleSite("aiter.ops.triton.fusions.fused_clamp_act_mul", CLAMP, CLAMP),
)


def hook_scale_sites(producers: Mapping[str, ScaleProducer]) -> tuple[ScaleSite, ...]:
    """Rebind every call site that this process has imported; calling it again changes nothing.

    :param producers: of the installed aiter, by name, as probed; call sites of others stay with upstream
    :returns: the call sites whose scales are column-major from here on
    """
    if not hasattr(sys.modules.get(_UTILS), MATERIALIZE.rsplit(".", 1)[1]):
        return ()
    hooked = []
    for site in SITES:
        original = getattr(sys.modules.get(site.module), site.name, None)
        if original is None or site.producer not in producers:
            continue
        if getattr(original, "weightprep_original", None) is None:
            behaviour = producers[site.producer].behaviour
            setattr(sys.modules[site.module], site.name, _column_major(original, site.producer, behaviour))
        hooked.append(site)
    return tuple(hooked)


def _column_major(original: Callable[..., Any], producer: str, behaviour: TransposeScale) -> Callable[..., Any]:
    """`original` with scales that lie column-major and say so, whatever the caller asks for."""
    path = f"group_scale/{producer}"
    probed = ScaleProducer(original, behaviour)

    def quantize(x: torch.Tensor, *arguments: Any, transpose_scale: bool = False, **keywords: Any) -> Any:
        if producer == CLAMP and keywords.get("dtype_quant") is None:
            return original(x, *arguments, **keywords)
        if behaviour is not TransposeScale.ROW_ONLY:
            if x.shape[0] < 2:
                # both orders are the same bytes
                witness.count(f"{path}/one_row")
                return original(x, *arguments, transpose_scale=transpose_scale, **keywords)
            witness.count(f"{path}/column_major")
            return probed(x, *arguments, layout=GroupScaleLayout.COLUMN, **keywords)
        ours = _SUBSTITUTES.get(producer)
        if ours is None or arguments:
            witness.decline(path, "this aiter has no column-major output of it")
            return original(x, *arguments, transpose_scale=transpose_scale, **keywords)
        witness.count(f"{path}/weightprep")
        return ours(x, **keywords)

    quantize.weightprep_original = original  # type: ignore[attr-defined]
    return quantize


def _flatten(x: torch.Tensor, *, group_size: int, dtype_quant: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if group_size != 128:
        raise ValueError(f"groups of {group_size}: sglang quantizes for o_proj in groups of 128")
    values, scales = flatten_quant_fp8(x, scale_layout=GroupScaleLayout.COLUMN, fp8_dtype=dtype_quant)
    return values, scales


def _group(x: torch.Tensor, *, quant_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_groups(x, layout=GroupScaleLayout.COLUMN, fp8=quant_dtype)


_SUBSTITUTES: Mapping[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {FLATTEN: _flatten, GROUP: _group}
