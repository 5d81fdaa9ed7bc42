"""Every stored encoding, edge blocks and row offsets included, against a NumPy reading of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import ENCODINGS, meaning, source

from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle, StepContext, make_step, run_steps

DEQUANTIZE = [make_step("dequantize", {}, "test")]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float32).contiguous().view(torch.int32).numpy()


@settings(max_examples=80, deadline=None)
@given(
    encoding=st.sampled_from(ENCODINGS),
    rows=st.integers(1, 300),
    groups=st.integers(1, 9),
    extra=st.integers(0, 31),
    block=st.sampled_from([(128, 128), (32, 32), (1, 128), (64, 32)]),
    e8m0=st.booleans(),
    seed=st.integers(0, 99),
)
def test_all_encodings(
    encoding: Encoding, rows: int, groups: int, extra: int, block: tuple[int, int], e8m0: bool, seed: int
) -> None:
    cols = 32 * groups + (0 if encoding is Encoding.MXFP4 else extra)
    bundle = source(encoding, rows, cols, seed, block=block, e8m0=e8m0)
    result = run_steps(DEQUANTIZE, bundle, StepContext())
    np.testing.assert_array_equal(bits(result["weight"]), meaning(bundle).view(np.int32))
    assert set(result) == {"weight"}
    assert (result.encoded.rows, result.encoded.cols) == (rows, cols)


@settings(max_examples=40, deadline=None)
@given(encoding=st.sampled_from(ENCODINGS), start=st.integers(0, 448), length=st.integers(1, 448))
def test_rows_of_a_rank_are_the_rows_of_the_whole(encoding: Encoding, start: int, length: int) -> None:
    whole = source(encoding, 896, 192)
    part = whole.encoded.slice_rows(start, start + length)
    tensors = {"weight": whole["weight"][start : start + length]}
    if "scale" in whole:
        rows = part.scale_rows
        tensors["scale"] = whole["scale"] if rows is None else whole["scale"][rows[0] : rows[1]]
    sliced = run_steps(DEQUANTIZE, Bundle(tensors, part.encoded), StepContext())
    np.testing.assert_array_equal(bits(sliced["weight"]), meaning(whole)[start : start + length].view(np.int32))


def test_floats_pass_as_they_are() -> None:
    bundle = source(Encoding.BF16, 8, 32)
    assert run_steps(DEQUANTIZE, bundle, StepContext())["weight"] is bundle["weight"]


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (torch.float32, float("nan"), r"scale nan at index \[1, 2\]"),
        (torch.float32, float("inf"), r"scale inf at index \[1, 2\]"),
        (torch.float32, -1.0, r"scale -1.0 at index"),
        (torch.uint8, 255, r"scale 255 \(NaN in e8m0\) at index \[1, 2\]"),
    ],
)
def test_faulty_scales_are_named_with_their_place(dtype: torch.dtype, value: float, words: str) -> None:
    bundle = source(Encoding.FP8_BLOCK, 256, 512, e8m0=dtype is torch.uint8)
    bundle["scale"][1, 2] = value
    with pytest.raises(CheckpointError, match=f"layer.weight: found {words}"):
        run_steps(DEQUANTIZE, bundle, StepContext(name="layer.weight"))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_weight_is_refused(code: int) -> None:
    bundle = source(Encoding.FP8_CHANNEL, 4, 32)
    bundle["weight"].view(torch.uint8)[3, 31] = code
    with pytest.raises(CheckpointError, match=r"layer\.weight: found a NaN code"):
        run_steps(DEQUANTIZE, bundle, StepContext(name="layer.weight"))


@pytest.mark.parametrize("shape", [(4, 14), (14, 3), (13, 4), (15, 4), (56,)])
def test_a_scale_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    weight = source(Encoding.FP8_BLOCK, 1792, 512)["weight"]
    encoded = EncodedShape(Encoding.FP8_BLOCK, 1792, 512, (128, 128))
    with pytest.raises(CheckpointError, match=r"wanted shape \[14, 4\]"):
        run_steps(DEQUANTIZE, Bundle.source(weight, torch.ones(shape), encoded), StepContext())
