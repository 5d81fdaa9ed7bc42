"""Step `quantize_mxfp4`: the absorbed matrices, or a whole weight, to e2m1 in groups of 32 under e8m0 scales.

Groups run along the axis that a matmul contracts over. For a whole weight [N, K] that is K. For w_kc (heads, nope,
rank) it is nope, while a checkpoint's groups run along rank: a stored MXFP4 kv_b_proj cannot become w_kc by
transposing, it has to be expanded and quantized again. For w_vc (heads, rank, v) the contraction is over rank, and the
groups are those of the checkpoint.
"""

from __future__ import annotations

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.e2m1 import Ties
from weightprep.formats.mx import MX_GROUP, ScaleRule
from weightprep.formats.mx import quantize_mxfp4 as quantize_groups
from weightprep.transforms.bundle import FLOATS, Bundle, Form, StepContext
from weightprep.transforms.quantize_fp8 import largest_magnitude, not_finite
from weightprep.transforms.step import transform

__all__ = ["absorb_mxfp4", "quantize_mxfp4"]

_MXFP4 = frozenset({Encoding.MXFP4})


def _absorbed_already(bundle: Bundle, context: StepContext, *, scale_rule: ScaleRule, ties: Ties) -> Bundle | None:
    return bundle if bundle.absorbed and bundle.encoded.encoding is Encoding.MXFP4 else None


def _whole_already(bundle: Bundle, context: StepContext, *, scale_rule: ScaleRule, ties: Ties) -> Bundle | None:
    return bundle if not bundle.absorbed and bundle.encoded.encoding is Encoding.MXFP4 else None


@transform(requires=Form(False, FLOATS), ensures=Form(False, _MXFP4), already=_whole_already)
def quantize_mxfp4(
    bundle: Bundle, context: StepContext, *, scale_rule: ScaleRule = "even", ties: Ties = "even"
) -> Bundle:
    """Quantize a weight [N, K] along K: packed uint8 [N, K/2] and scale uint8 (e8m0) [N, K/32].

    :raises CheckpointError: K is not a multiple of 32, or a value is NaN or infinite
    """
    packed, scale = _quantize(bundle["weight"], scale_rule, ties, context.name)
    return Bundle({"weight": packed, "scale": scale}, _mxfp4(bundle.encoded))


@transform(requires=Form(True, FLOATS), ensures=Form(True, _MXFP4), already=_absorbed_already)
def absorb_mxfp4(
    bundle: Bundle, context: StepContext, *, scale_rule: ScaleRule = "even", ties: Ties = "even"
) -> Bundle:
    """Quantize w_kc and w_vc along the axis that each contracts over.

    w_kc (heads, nope/2, rank) with w_scale_k (heads, nope/32, rank), w_vc (heads, rank/2, v) with w_scale_v (heads,
    rank/32, v), all uint8 and stored with that axis contiguous.

    :raises CheckpointError: nope or rank is not a multiple of 32, or a value is NaN or infinite
    """
    w_kc, w_scale_k = _quantize(bundle["w_kc"].transpose(1, 2), scale_rule, ties, context.name)
    w_vc, w_scale_v = _quantize(bundle["w_vc"].transpose(1, 2), scale_rule, ties, context.name)
    tensors = {"w_kc": w_kc, "w_vc": w_vc, "w_scale_k": w_scale_k, "w_scale_v": w_scale_v}
    return Bundle({role: tensor.transpose(1, 2) for role, tensor in tensors.items()}, _mxfp4(bundle.encoded))


def _quantize(values: torch.Tensor, rule: ScaleRule, ties: Ties, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if values.shape[-1] % MX_GROUP:
        raise CheckpointError(
            name,
            found=f"{values.shape[-1]} elements along the axis to quantize",
            wanted=f"a multiple of {MX_GROUP}",
            remedy="choose another precision for this model",
        )
    if not bool(torch.isfinite(largest_magnitude(values))):
        raise not_finite(name)
    return quantize_groups(values, rule, ties)


def _mxfp4(encoded: EncodedShape) -> EncodedShape:
    return EncodedShape(Encoding.MXFP4, encoded.rows, encoded.cols)
