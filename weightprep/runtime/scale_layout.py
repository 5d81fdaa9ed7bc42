"""Where the scales of group-quantized activations lie in memory, said once, so that strides always tell the truth.

A row of K values quantized in groups of 128 has K / 128 float32 scales. The logical tensor is always (rows, groups).
Some GEMMs (aiter's bpreshuffle ones on gfx95) read the bytes column-major, the scales of one group over all rows side
by side; others read them row-major. A column-major byte order behind row-major strides is a tensor that lies: every
consumer has to know. Here a scale in column-major order has the strides (1, rows), and the two functions for tensors
that lie are named for what they do.
"""

from __future__ import annotations

from enum import Enum

import torch

from weightprep.errors import ContractError
from weightprep.runtime.choice import member

__all__ = ["GroupScaleLayout", "behind_row_major_strides", "materialize", "with_true_strides"]


class GroupScaleLayout(str, Enum):
    """Byte order of a (rows, groups) scale tensor.

    With one row, or one group, both orders are the same bytes, so such a tensor holds both layouts; producers then
    write row-major and no consumer needs a conversion.
    """

    ROW = "row"
    COLUMN = "column"

    def strides(self, rows: int, groups: int) -> tuple[int, int]:
        """Strides in elements: (groups, 1) for ROW, (1, rows) for COLUMN; an empty dimension counts as one."""
        return (max(groups, 1), 1) if self is GroupScaleLayout.ROW else (1, max(rows, 1))

    def empty(
        self, rows: int, groups: int, *, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Uninitialized (rows, groups) tensor in this layout, dense, with true strides."""
        return torch.empty_strided((rows, groups), self.strides(rows, groups), dtype=dtype, device=device)

    def holds(self, scale: torch.Tensor) -> bool:
        """Whether the strides of the 2-D `scale` say that its bytes are dense and in this layout."""
        if scale.dim() != 2:
            return False
        rows, groups = scale.shape
        wanted = self.strides(rows, groups)
        # A dimension of size one is never stepped over, so its stride says nothing.
        return scale.numel() == 0 or all(
            size == 1 or stride == want for size, stride, want in zip(scale.shape, scale.stride(), wanted, strict=True)
        )


def with_true_strides(scale: torch.Tensor, stored: GroupScaleLayout | str) -> torch.Tensor:
    """The same bytes as a (rows, groups) tensor whose strides tell the order in which they really lie. Zero-copy.

    :param scale: dense (rows, groups) tensor whose strides may lie
    :param stored: the order of its bytes
    :raises ContractError: `scale` is not 2-D or not dense, so that no stride could be true
    """
    _require_dense(scale)
    rows, groups = scale.shape
    return scale.as_strided((rows, groups), member(GroupScaleLayout, stored, "stored").strides(rows, groups))


def behind_row_major_strides(scale: torch.Tensor) -> torch.Tensor:
    """The bytes of a scale behind strides (groups, 1), whatever their order. Zero-copy.

    For consumers that expect column-major bytes in a tensor that looks contiguous; the inverse of
    :func:`with_true_strides`. The result of a COLUMN scale indexes wrongly: hand it to such a consumer only.

    :raises ContractError: `scale` is not 2-D or not dense
    """
    return with_true_strides(scale, GroupScaleLayout.ROW)


def materialize(scale: torch.Tensor, layout: GroupScaleLayout | str) -> torch.Tensor:
    """`scale` itself where it already lies in `layout`, otherwise a copy in that layout with the same logical values.

    :param scale: (rows, groups), any strides that tell the truth
    :raises ContractError: `scale` is not 2-D
    """
    layout = member(GroupScaleLayout, layout, "layout")
    if layout.holds(scale):
        return scale
    if scale.dim() != 2:
        raise _not_a_group_scale(scale, "a 2-D (rows, groups) tensor")
    rows, groups = scale.shape
    return layout.empty(rows, groups, device=scale.device, dtype=scale.dtype).copy_(scale)


def _require_dense(scale: torch.Tensor) -> None:
    if not any(layout.holds(scale) for layout in GroupScaleLayout):
        raise _not_a_group_scale(scale, "a dense (rows, groups) tensor, row-major or column-major")


def _not_a_group_scale(scale: torch.Tensor, wanted: str) -> ContractError:
    return ContractError(
        "group scale",
        found=f"shape {tuple(scale.shape)} with strides {scale.stride()}",
        wanted=wanted,
        remedy="pass the scale tensor as its producer returned it, not a slice of it",
    )
