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

from weightprep.engines.sglang.versions import MATERIALIZE, SCALE_SITES
from weightprep.runtime import witness
from weightprep.runtime.flatten import flatten_quant_fp8
from weightprep.runtime.group_quant import FP8_GROUP, FP8_MAX
from weightprep.runtime.rms_quant import quantize_groups
from weightprep.runtime.scale_layout import GroupScaleLayout
from weightprep.runtime.scale_probe import ScaleProducer, TransposeScale

__all__ = ["CLAMP", "FLATTEN", "GROUP", "RMS", "SITES", "ScaleSite", "hook_scale_sites"]

RMS, FLATTEN, GROUP, CLAMP = (
    "fused_rms_fp8_group_quant",
    "fused_flatten_fp8_group_quant",
    "per_group_quant_hip",
    "fused_clamp_act_mul",
)
_MATERIALIZE_IN, _, _MATERIALIZE = MATERIALIZE.rpartition(".")
# sglang binds this one under a name of its own
_RENAMED = {"aiter_per1x128_quant": GROUP}


@dataclass(frozen=True, slots=True)
class ScaleSite:
    """A module that calls one of aiter's quantizations.

    :param name: under which `module` has it
    :param producer: which of aiter's it is
    """

    module: str
    name: str
    producer: str


def _site(dotted: str) -> ScaleSite:
    module, _, name = dotted.rpartition(".")
    return ScaleSite(module, name, _RENAMED.get(name, name))


SITES = tuple(_site(dotted) for dotted in SCALE_SITES)


def hook_scale_sites(producers: Mapping[str, ScaleProducer]) -> tuple[ScaleSite, ...]:
    """Rebind every call site that this process has imported; calling it again changes nothing.

    :param producers: of the installed aiter, by name, as probed; call sites of others stay with upstream
    :returns: the call sites whose scales are column-major from here on
    """
    if not hasattr(sys.modules.get(_MATERIALIZE_IN), _MATERIALIZE):
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

    def quantize(x: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        asked = dict(keywords)
        keywords.pop("transpose_scale", None)
        if producer == CLAMP and keywords.get("dtype_quant") is None:
            return original(x, *arguments, **keywords)
        if behaviour is not TransposeScale.ROW_ONLY:
            if x.shape[0] < 2:
                # both orders are the same bytes
                witness.count(f"{path}/one_row")
                return original(x, *arguments, **asked)
            witness.count(f"{path}/column_major")
            return probed(x, *arguments, layout=GroupScaleLayout.COLUMN, **keywords)
        ours = _SUBSTITUTES.get(producer, _no_substitute)(x, *arguments, **keywords)
        if isinstance(ours, str):
            witness.decline(path, f"this aiter has no column-major output of it{ours}")
            return original(x, *arguments, **asked)
        witness.count(f"{path}/weightprep")
        return ours

    quantize.weightprep_original = original  # type: ignore[attr-defined]
    return quantize


_Pair = tuple[torch.Tensor, torch.Tensor]


def _no_substitute(x: torch.Tensor, *_: object, **__: object) -> str:
    return ""


# The substitutes take the arguments of aiter's functions, and say why a call is not for them: the end of a sentence.


def _flatten(
    x: torch.Tensor, group_size: object = None, dtype_quant: Any = None, *rest: object, **others: object
) -> _Pair | str:
    if group_size != FP8_GROUP or dtype_quant not in FP8_MAX or x.dim() != 3 or x.shape[2] % FP8_GROUP:
        return ", and weightprep's takes heads in whole groups of 128, to fp8"
    if rest or others:
        return f", and weightprep's does not know {_names(rest, others)}"
    values, scales = flatten_quant_fp8(x, scale_layout=GroupScaleLayout.COLUMN, fp8_dtype=dtype_quant)
    return values, scales


def _group(
    x: torch.Tensor,
    scale: object = None,
    quant_dtype: Any = None,
    group_size: object = FP8_GROUP,
    *rest: object,
    num_rows: object = None,
    num_rows_factor: object = 1,
    **others: object,
) -> _Pair | str:
    whole = x.dim() == 2 and x.shape[1] % FP8_GROUP == 0 and x.stride(1) == 1
    if group_size != FP8_GROUP or quant_dtype not in FP8_MAX or not whole:
        return ", and weightprep's takes contiguous rows in whole groups of 128, to fp8"
    given = others | {name: value for name, value in (("scale", scale), ("num_rows", num_rows)) if value is not None}
    if rest or given:
        return f", and weightprep's does not know {_names(rest, given)}"
    return quantize_groups(x, layout=GroupScaleLayout.COLUMN, fp8=quant_dtype)


def _names(rest: tuple[object, ...], others: Mapping[str, object]) -> str:
    return ", ".join([*sorted(others), *(["further arguments by position"] if rest else [])])


_SUBSTITUTES: Mapping[str, Callable[..., _Pair | str]] = {FLATTEN: _flatten, GROUP: _group}
