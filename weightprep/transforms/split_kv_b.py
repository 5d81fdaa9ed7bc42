"""Step `split_kv_b`: from MLA's kv_b_proj to the two matrices that are absorbed into attention.

Rows of kv_b_proj are head-major, and within a head the nope rows of the key come before the rows of the value.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import Encoding
from weightprep.transforms.bundle import FLOATS, Bundle, Form, StepContext
from weightprep.transforms.step import transform

__all__ = ["kv_b_shape", "split_kv_b"]

# encodings in which rows can be separated without touching a scale
_SPLITTABLE = FLOATS | {Encoding.FP8_TENSOR}


def kv_b_shape(dims: Mapping[str, int]) -> tuple[int, int]:
    """Rows and columns that kv_b_proj has for `dims`."""
    return (dims["heads"] * (dims["nope"] + dims["v"]), dims["rank"])


@transform(
    requires=Form(False, _SPLITTABLE),
    ensures=lambda given: Form(True, given.encodings),
    dims=("heads", "nope", "v", "rank"),
)
def split_kv_b(bundle: Bundle, context: StepContext) -> Bundle:
    """Split kv_b_proj [heads * (nope + v), rank] into the views w_kc (heads, nope, rank) and w_vc (heads, rank, v).

    A per-tensor scale becomes the 0-dim float32 w_scale of both.

    :raises CheckpointError: if the weight's shape is not what the model's dims say
    """
    dims = context.dims
    nope, v, weight = dims["nope"], dims["v"], bundle["weight"]
    wanted = kv_b_shape(dims)
    if tuple(weight.shape) != wanted:
        raise CheckpointError(
            context.name,
            found=f"shape {list(weight.shape)}",
            wanted=f"{list(wanted)} for {dims['heads']} heads, nope {nope}, v {v}, rank {dims['rank']}",
            remedy="check config.json against the weights, and the tensor parallel size against the heads",
        )
    w_kc, w_vc = torch.split(torch.unflatten(weight, 0, (-1, nope + v)), [nope, v], dim=1)
    tensors = {"w_kc": w_kc, "w_vc": w_vc.transpose(1, 2)}
    if "scale" in bundle:
        tensors["w_scale"] = bundle["scale"].to(torch.float32).reshape(())
    return Bundle(tensors, bundle.encoded)
