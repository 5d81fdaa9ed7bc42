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


@pytest.mark.parametrize("heads", [8, 24, 64])
def test_heads_are_looked_at_in_even_steps_and_not_the_first_ones(heads: int) -> None:
    """Eight of them: 0, 8, ... 56 of 64."""
    source = weights().repeat(heads // HEADS, 1, 1)
    rows = Bundle.source(source.flatten(0, 1), None, EncodedShape(Encoding.BF16, heads * ROWS, RANK))
    shape = EncodedShape(Encoding.FP8_TENSOR, heads * ROWS, RANK)
    seen = []
    for head in range(heads):
        prepared = per_tensor(source)
        prepared["w_vc"][head] = 0
        if sqnr_db(measure_noise(rows, Bundle(prepared, shape), ROWS, "kv_b_proj")) < 10:
            seen.append(head)
    assert seen == list(range(0, heads, heads // 8))


def test_each_head_of_a_block_fp8_source_has_its_own_scales() -> None:
    """Heads of 96 rows lie across blocks of 128, and each row of blocks has a scale of another size."""
    blocks = HEADS * ROWS // 128
    scale = 2.0 ** -(torch.arange(blocks).view(blocks, 1) % 3 + 6).float()
    stored = (torch.randn(HEADS * ROWS, RANK, generator=torch.Generator().manual_seed(2)) * 60).to(torch.float8_e4m3fn)
    exact = (stored.float() * scale.repeat_interleave(128, 0)).unflatten(0, (HEADS, ROWS))
    shape = EncodedShape(Encoding.FP8_BLOCK, HEADS * ROWS, RANK, (128, 128))
    prepared = Bundle(
        {"w_kc": exact[:, :NOPE].bfloat16(), "w_vc": exact[:, NOPE:].transpose(1, 2).bfloat16()},
        EncodedShape(Encoding.BF16, HEADS * ROWS, RANK),
    )
    # the scales are powers of two, so bf16 holds every number
    assert sqnr_db(measure_noise(Bundle.source(stored, scale, shape), prepared, ROWS, "kv_b_proj")) == math.inf
