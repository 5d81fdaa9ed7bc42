"""The noise of prepared weights, which has to show the worst head."""

from __future__ import annotations

import math

import pytest
import torch

from weightprep.engines.sglang.quality_check import measure_noise, sqnr_db
from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle

HEADS, NOPE, V, RANK = 8, 64, 32, 128
ROWS = NOPE + V


def weights() -> torch.Tensor:
    return (0.02 * torch.randn(HEADS, ROWS, RANK, generator=torch.Generator().manual_seed(1))).bfloat16()


def fp8(weight: torch.Tensor, scale: float) -> torch.Tensor:
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def measured(source: torch.Tensor, prepared: dict[str, torch.Tensor]) -> float:
    rows = Bundle.source(source.flatten(0, 1), None, EncodedShape(Encoding.BF16, HEADS * ROWS, RANK))
    shape = EncodedShape(Encoding.FP8_TENSOR, HEADS * ROWS, RANK)
    return sqnr_db(measure_noise(rows, Bundle(prepared, shape), ROWS, "kv_b_proj"))


def per_tensor(source: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = float(source.float().abs().max()) / 448
    stored = fp8(source, scale)
    return {"w_kc": stored[:, :NOPE], "w_vc": stored[:, NOPE:].transpose(1, 2), "w_scale": torch.tensor(scale)}


@pytest.mark.parametrize("head", range(HEADS))
def test_an_outlier_that_takes_the_whole_range_does_not_hide_the_other_heads(head: int) -> None:
    source = weights()
    source[head, 3, 3] = 3e4
    # half of the smallest e4m3 number of this scale is 2^-10 * 3e4 / 448 = 0.065, 3.3 deviations of the others: nearly
    # all of them become zero, and the noise is the signal
    assert 0 <= measured(source, per_tensor(source)) < 1


@pytest.mark.parametrize("head", range(HEADS))
def test_one_wrong_head_is_seen_wherever_it_is(head: int) -> None:
    source = weights()
    prepared = per_tensor(source)
    # normal data: relative error 0.0265 in e4m3, 31.5 dB
    assert 31.0 < measured(source, prepared) < 32.1
    prepared["w_kc"][head] = 0
    assert measured(source, prepared) < 5


def test_a_head_of_zeros_is_no_fault_unless_something_was_made_of_it() -> None:
    source = weights()
    prepared = per_tensor(source)
    source[2] = 0
    assert measured(source, per_tensor(source)) > 31.0
    assert measured(source, prepared) == -math.inf
    assert measured(torch.zeros_like(source), per_tensor(source) | {"w_scale": torch.tensor(0.0)}) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_below_every_floor(value: float) -> None:
    source = weights()
    prepared = per_tensor(source)
    source[5, 0, 0] = value
    assert measured(source, prepared) == -math.inf
    assert measured(weights(), prepared | {"w_scale": torch.tensor(value)}) == -math.inf


def test_a_part_in_bf16_is_not_scaled() -> None:
    source = weights()
    prepared = per_tensor(source) | {"w_kc": source[:, :NOPE]}
    # only a third of the energy is quantized: 31.5 + 10 log10(3)
    assert 35.7 < measured(source, prepared) < 36.9
