"""What the installed aiter does when a producer is asked for transposed scales, found out by asking it.

The same parameter, `transpose_scale=True`, has had three meanings in released and current aiter: transposed bytes
behind row-major strides (fused_rms_fp8_group_quant of 0.1.7), a view with the strides (1, rows) (its main branch), and
none at all (fused_flatten_fp8_group_quant of 0.1.7 does not know the parameter). Read with the wrong assumption the
numbers are garbage and nothing fails. So a producer is called once at startup on values whose scales are all
different, and from then on through a wrapper that gives its callers one truth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from weightprep.errors import EngineError
from weightprep.runtime.choice import member
from weightprep.runtime.scale_layout import GroupScaleLayout, materialize, with_true_strides

__all__ = [
    "ScaleProducer",
    "TransposeScale",
    "clamp_arguments",
    "group_arguments",
    "probe_producer",
    "rms_arguments",
]

_ROWS, _GROUPS, _GROUP = 3, 2, 128
# Of the second group of each row to its first, in the probed values and so in their scales.
_RATIOS = (2.0, 4.0, 8.0)
# More than rounding to bf16 before the quantization changes of a ratio; any other order is off by more.
_ROUNDING = 0.01


class TransposeScale(str, Enum):
    """What `transpose_scale=True` returns, for a (rows, groups) scale."""

    TRANSPOSED_BYTES = "transposed bytes behind row-major strides"
    STRIDED_VIEW = "a view with strides (1, rows)"
    ROW_ONLY = "no column-major output: the parameter is absent or without effect"


@dataclass(frozen=True, slots=True)
class ScaleProducer:
    """A quantizing function of aiter whose scales come back in the layout that was asked for, with true strides.

    :param function: returns (q, scale) or ((q, scale), ...), as aiter's producers do
    :param behaviour: what the probe found
    """

    function: Callable[..., Any]
    behaviour: TransposeScale

    def __call__(self, *arguments: object, layout: GroupScaleLayout | str, **keywords: object) -> Any:
        """Call the producer; its result with the scale in `layout`.

        Zero-copy, except for COLUMN from a producer that cannot write it: there one small copy stays.
        """
        layout = member(GroupScaleLayout, layout, "layout")
        if layout is GroupScaleLayout.ROW or self.behaviour is TransposeScale.ROW_ONLY:
            result = self.function(*arguments, **keywords)
            return _with_scale(result, materialize(_scale_of(result), layout))
        result = self.function(*arguments, transpose_scale=True, **keywords)
        scale = _scale_of(result)
        if self.behaviour is TransposeScale.TRANSPOSED_BYTES:
            scale = with_true_strides(scale, GroupScaleLayout.COLUMN)
        return _with_scale(result, scale)


def group_arguments(**keywords: object) -> Callable[[torch.Tensor], tuple[tuple[object, ...], Mapping[str, object]]]:
    """Arguments of a producer that takes a (rows, columns) tensor first, such as aiter's per_1x128 quantization."""
    return lambda x: ((x,), keywords)


def rms_arguments(**keywords: object) -> Callable[[torch.Tensor], tuple[tuple[object, ...], Mapping[str, object]]]:
    """Arguments of aiter's fused_rms_fp8_group_quant: the tensor, a weight of ones, an epsilon."""
    return lambda x: ((x, torch.ones(x.shape[1], dtype=x.dtype, device=x.device), 1e-6), keywords)


def clamp_arguments(**keywords: object) -> Callable[[torch.Tensor], tuple[tuple[object, ...], Mapping[str, object]]]:
    """Arguments of aiter's fused_clamp_act_mul: a gate of ones beside the tensor."""
    return lambda x: ((torch.cat((torch.ones_like(x), x), dim=1),), keywords)


def probe_producer(
    function: Callable[..., Any],
    arguments: Callable[[torch.Tensor], tuple[tuple[object, ...], Mapping[str, object]]],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
) -> ScaleProducer:
    """Call `function` with and without transposed scales on three rows of two groups, and tell what it did.

    Synchronizes with the device: call it at startup, never in a captured region.

    :param function: the producer under test
    :param arguments: from a (3, 256) tensor to the producer's positional and keyword arguments
    :raises EngineError: a plain call has scales that are not in the order of their rows, or transposed ones are neither
        those nor their transpose in either form
    """
    positional, keywords = arguments(_probe_values(dtype, device))
    row = _scale_of(function(*positional, **keywords)).float()
    if row.shape != (_ROWS, _GROUPS) or len(set(row.flatten().tolist())) != row.numel():
        raise _unknown(function, f"scales of shape {tuple(row.shape)} that do not follow the values: {row.tolist()}")
    if not _in_row_order(row):
        raise _unknown(function, f"in another order than their rows', without being asked for it: {row.tolist()}")
    if not _knows_transpose_scale(function):
        return ScaleProducer(function, TransposeScale.ROW_ONLY)
    transposed = _scale_of(function(*positional, transpose_scale=True, **keywords))
    if torch.equal(transposed.float(), row):
        column = GroupScaleLayout.COLUMN.holds(transposed)
        return ScaleProducer(function, TransposeScale.STRIDED_VIEW if column else TransposeScale.ROW_ONLY)
    if transposed.shape == row.shape and GroupScaleLayout.ROW.holds(transposed):
        restored = with_true_strides(transposed, GroupScaleLayout.COLUMN)
        if torch.equal(restored.float(), row):
            return ScaleProducer(function, TransposeScale.TRANSPOSED_BYTES)
    found = f"shape {tuple(transposed.shape)}, strides {transposed.stride()}, values {transposed.tolist()}"
    raise _unknown(function, f"{found} for the scales {row.tolist()}")


def _probe_values(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    # Ratios of 2, 4 and 8 between the groups: all six scales differ, with and without an RMSNorm in front.
    ratios = torch.tensor(_RATIOS, device=device)
    sizes = torch.tensor([1.0, 64.0, 4096.0], device=device)
    pair = torch.stack((sizes, sizes * ratios), dim=1)
    return pair.repeat_interleave(_GROUP, dim=1).to(dtype)


def _in_row_order(scale: torch.Tensor) -> bool:
    wanted = torch.tensor(_RATIOS, device=scale.device)
    return bool(((scale[:, 1] / scale[:, 0] - wanted).abs() < _ROUNDING * wanted).all())


def _knows_transpose_scale(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "transpose_scale" in parameters


def _scale_of(result: Any) -> torch.Tensor:
    pair = result[0] if isinstance(result[0], (tuple, list)) else result
    scale = pair[1]
    if not isinstance(scale, torch.Tensor):
        raise EngineError(
            "aiter quantization",
            found=f"a {type(scale).__name__} where the scale should be",
            wanted="(q, scale) or ((q, scale), ...)",
            remedy="use weightprep's own producers: runtime=triton",
        )
    return scale


def _with_scale(result: Any, scale: torch.Tensor) -> Any:
    if isinstance(result[0], (tuple, list)):
        return ((result[0][0], scale, *result[0][2:]), *result[1:])
    return (result[0], scale, *result[2:])


def _unknown(function: Callable[..., Any], found: str) -> EngineError:
    return EngineError(
        f"transpose_scale of {getattr(function, '__module__', '?')}.{getattr(function, '__name__', function)}",
        found=found,
        wanted=" | ".join(behaviour.value for behaviour in TransposeScale),
        remedy="install an aiter whose layout is known, or use weightprep's own producers: runtime=triton",
    )
