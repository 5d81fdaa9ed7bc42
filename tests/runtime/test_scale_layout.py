"""Group scale layouts: strides that tell the truth, and views of those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightprep.errors import ContractError
from weightprep.runtime.scale_layout import GroupScaleLayout, behind_row_major_strides, materialize, with_true_strides

ROW, COLUMN = GroupScaleLayout.ROW, GroupScaleLayout.COLUMN
SHAPES = [(0, 3), (3, 0), (1, 1), (1, 5), (5, 1), (2, 2), (13, 7)]


def logical(rows: int, groups: int) -> np.ndarray:
    return np.arange(rows * groups, dtype=np.float32).reshape(rows, groups)


def bytes_in_memory(scale: torch.Tensor) -> np.ndarray:
    """The elements in address order, read from the storage, not through the strides."""
    start = scale.storage_offset() * scale.element_size()
    raw = bytes(scale.untyped_storage())[start : start + scale.numel() * scale.element_size()]
    return np.frombuffer(raw, dtype=np.float32)


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
@pytest.mark.parametrize("layout", GroupScaleLayout)
def test_empty_lays_bytes_as_the_name_says(layout: GroupScaleLayout, rows: int, groups: int) -> None:
    values = logical(rows, groups)
    scale = layout.empty(rows, groups, device="cpu")
    scale.copy_(torch.from_numpy(values))
    assert scale.shape == (rows, groups)
    assert layout.holds(scale)
    order = "C" if layout is ROW else "F"
    np.testing.assert_array_equal(bytes_in_memory(scale), values.ravel(order))


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_a_layout_holds_the_other_only_where_the_bytes_coincide(rows: int, groups: int) -> None:
    coincide = rows <= 1 or groups <= 1
    assert COLUMN.holds(ROW.empty(rows, groups, device="cpu")) is coincide
    assert ROW.holds(COLUMN.empty(rows, groups, device="cpu")) is coincide


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_transposed_bytes_behind_row_major_strides_are_read_right(rows: int, groups: int) -> None:
    values = logical(rows, groups)
    lying = torch.from_numpy(np.ascontiguousarray(values.T).reshape(rows, groups))
    scale = with_true_strides(lying, COLUMN)
    np.testing.assert_array_equal(scale.numpy(), values)
    assert scale.data_ptr() == lying.data_ptr()
    assert COLUMN.holds(scale)


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_views_are_inverse_and_copy_nothing(rows: int, groups: int) -> None:
    scale = COLUMN.empty(rows, groups, device="cpu").copy_(torch.from_numpy(logical(rows, groups)))
    lying = behind_row_major_strides(scale)
    assert lying.is_contiguous()
    assert lying.data_ptr() == scale.data_ptr()
    back = with_true_strides(lying, COLUMN)
    assert back.data_ptr() == scale.data_ptr()
    assert torch.equal(back, scale)


def test_a_view_keeps_the_storage_offset() -> None:
    storage = torch.arange(100, dtype=torch.float32)
    lying = storage[40:52].view(4, 3)
    assert with_true_strides(lying, COLUMN)[1, 2].item() == 40 + 2 * 4 + 1


def test_a_true_column_view_stays_as_it_is() -> None:
    """A producer that already returns strides (1, rows) may be passed through the same call."""
    scale = COLUMN.empty(4, 3, device="cpu").copy_(torch.from_numpy(logical(4, 3)))
    assert torch.equal(with_true_strides(scale, COLUMN), scale)


@pytest.mark.parametrize("target", GroupScaleLayout)
@pytest.mark.parametrize("source", GroupScaleLayout)
@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_materialize_keeps_values_and_copies_only_when_it_must(
    source: GroupScaleLayout, target: GroupScaleLayout, rows: int, groups: int
) -> None:
    scale = source.empty(rows, groups, device="cpu").copy_(torch.from_numpy(logical(rows, groups)))
    out = materialize(scale, target)
    assert torch.equal(out, scale)
    assert target.holds(out)
    assert (out is scale) is (source is target or rows <= 1 or groups <= 1)


def test_materialize_takes_a_strided_slice() -> None:
    scale = torch.arange(24, dtype=torch.float32).view(4, 6)[:, 1:4]
    out = materialize(scale, COLUMN)
    assert torch.equal(out, scale)
    assert COLUMN.holds(out)


@pytest.mark.parametrize(
    "scale", [torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(4, 6)[:, 1:4], torch.zeros(4, 6)[::2]]
)
def test_a_tensor_for_which_no_stride_could_be_true_is_refused(scale: torch.Tensor) -> None:
    with pytest.raises(ContractError, match="group scale: found shape"):
        with_true_strides(scale, COLUMN)


def test_materialize_refuses_what_is_no_group_scale() -> None:
    with pytest.raises(ContractError, match="2-D"):
        materialize(torch.zeros(3), ROW)
