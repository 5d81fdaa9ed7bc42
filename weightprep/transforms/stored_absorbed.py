"""Absorbed MXFP4 matrices as a file holds them: each as one ordinary MXFP4 linear weight.

w_kc's groups run along nope, so no kv_b_proj can hold them. What a file can hold are two matrices with the contraction
axis last: `<module>.w_kc` [heads * rank, nope] and `<module>.w_vc` [heads * v, rank]. Both are stored like every MXFP4
linear, packed weight and e8m0 scale, and a rank's heads are a range of rows of each.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightprep.deferred import torch
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.mx import MX_GROUP, dequantize_mxfp4
from weightprep.transforms.bundle import Bundle

__all__ = ["STORED_NAMES", "from_linears", "reassemble", "stored_shapes", "to_linears"]

# role -> what follows the module's name in a file
STORED_NAMES = {
    "w_kc": ".w_kc.weight",
    "w_scale_k": ".w_kc.weight_scale",
    "w_vc": ".w_vc.weight",
    "w_scale_v": ".w_vc.weight_scale",
}


def stored_shapes(dims: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Shape in a file, uint8, by role."""
    heads, nope, v, rank = (dims[name] for name in ("heads", "nope", "v", "rank"))
    return {
        "w_kc": (heads * rank, nope // 2),
        "w_scale_k": (heads * rank, nope // MX_GROUP),
        "w_vc": (heads * v, rank // 2),
        "w_scale_v": (heads * v, rank // MX_GROUP),
    }


def to_linears(bundle: Bundle) -> dict[str, torch.Tensor]:
    """The matrices of an absorbed MXFP4 bundle as a file holds them, by role."""
    return {role: bundle[role].transpose(1, 2).flatten(0, 1).contiguous() for role in STORED_NAMES}


def from_linears(tensors: Mapping[str, torch.Tensor], heads: int) -> Bundle:
    """The absorbed bundle of matrices [rows, bytes] as a file holds them.

    :param tensors: by role; all rows of `heads` heads
    """
    absorbed = {role: torch.unflatten(tensors[role], 0, (heads, -1)).transpose(1, 2) for role in STORED_NAMES}
    _, nope, rank = absorbed["w_kc"].shape
    rows = heads * (2 * nope + absorbed["w_vc"].shape[2])
    return Bundle(absorbed, EncodedShape(Encoding.MXFP4, rows, rank))


def reassemble(bundle: Bundle) -> torch.Tensor:
    """The kv_b_proj [heads * (nope + v), rank] in float32 that an absorbed MXFP4 bundle stands for."""
    k = dequantize_mxfp4(bundle["w_kc"].transpose(1, 2), bundle["w_scale_k"].transpose(1, 2)).transpose(1, 2)
    v = dequantize_mxfp4(bundle["w_vc"].transpose(1, 2), bundle["w_scale_v"].transpose(1, 2))
    return torch.cat([k, v], dim=1).flatten(0, 1)
