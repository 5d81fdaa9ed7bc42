"""Step `layout`: the memory order in which the batched kernels read the absorbed matrices.

w_kc (heads, nope, rank) and w_vc (heads, rank, v) are the [K, N] operands of two batched matmuls. `nk_contiguous`
stores each head as [N, K], so that the axis that the kernel contracts over is contiguous and a transposed view is
plainly contiguous.
"""

from __future__ import annotations

from typing import Literal

from weightprep.deferred import torch
from weightprep.transforms.bundle import ANY_ENCODING, Bundle, Form, StepContext
from weightprep.transforms.step import transform

__all__ = ["layout"]

Order = Literal["nk_contiguous", "kn_contiguous"]


@transform(requires=Form(True, ANY_ENCODING), ensures=lambda given, **_: given)
def layout(
    bundle: Bundle, context: StepContext, *, w_kc: Order = "nk_contiguous", w_vc: Order = "nk_contiguous"
) -> Bundle:
    """Store w_kc and w_vc, and the group scales of each, in the named order; shapes stay."""
    order = {"w_kc": w_kc, "w_scale_k": w_kc, "w_vc": w_vc, "w_scale_v": w_vc}
    return Bundle({role: _store(tensor, order.get(role)) for role, tensor in bundle.items()}, bundle.encoded)


def _store(tensor: torch.Tensor, order: Order | None) -> torch.Tensor:
    if order is None:
        return tensor
    # Always a copy: with one head `contiguous` would return a view of the checkpoint's weight, with its strides.
    stored = tensor.transpose(1, 2) if order == "nk_contiguous" else tensor
    stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.transpose(1, 2) if order == "nk_contiguous" else stored
