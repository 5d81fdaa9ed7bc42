"""Figures of quality hold at every magnitude, and nothing unmeasured passes a floor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from weightprep.checkpoint.manifest import QualityRecord
from weightprep.convert.quality import is_below, measure
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle


def fp32(values: torch.Tensor) -> Bundle:
    return Bundle({"weight": values}, EncodedShape(Encoding.FP32, *values.shape))


@pytest.mark.parametrize("exponent", [-126, -90, -77, -40, 0, 40, 60, 64, 100, 125])
@pytest.mark.parametrize("kept", [0.0, 0.97])
def test_figures_do_not_depend_on_the_magnitude(exponent: int, kept: float) -> None:
    weight = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).mul_(0.25).mul_(2.0**exponent)
    stored = weight * kept
    got = measure(fp32(weight), fp32(stored), heads=4, name="w")

    exact, result = weight.numpy().astype(np.float64), stored.numpy().astype(np.float64)
    # the difference is taken in float32, and the figures have four digits
    error = float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
    assert got.relative_error == pytest.approx(error, rel=1e-3)
    assert got.sqnr_db == pytest.approx(-20 * math.log10(error), rel=1e-3, abs=1e-3)
    assert got.amax == float(np.abs(exact).max())
    assert got.max_error == pytest.approx(float(np.abs(result - exact).max()), rel=1e-3)
    assert is_below(got, 28.0) == (kept == 0.0 or -20 * math.log10(error) < 28)
    assert is_below(got, 40.0)


def test_exact_result_has_no_noise() -> None:
    weight = torch.randn(16, 8)
    got = measure(fp32(weight), fp32(weight.clone()), heads=None, name="w")
    assert (got.relative_error, got.sqnr_db) == (0.0, None)
    assert not is_below(got, 28.0)


def test_zero_weight_that_stays_zero_is_exact_and_one_that_does_not_is_below_any_floor() -> None:
    zero = torch.zeros(4, 4)
    assert not is_below(measure(fp32(zero), fp32(zero.clone()), heads=None, name="w"), 28.0)
    noisy = measure(fp32(zero), fp32(zero + 1e-30), heads=None, name="w")
    assert noisy.sqnr_db is None
    assert is_below(noisy, -1000.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_result_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    weight = torch.ones(4, 4)
    stored = weight.clone()
    stored[2, 1] = bad
    with pytest.raises(CheckpointError, match=r"model\.x\.weight.*not finite"):
        measure(fp32(weight), fp32(stored), heads=None, name="model.x.weight")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_record_never_holds_a_number_that_json_has_not(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        QualityRecord(
            relative_error=bad, sqnr_db=None, worst_head_sqnr_db=None, max_error=0.0, amax=0.0, head_amax_ratio=None
        )


def test_no_floor_is_never_missed() -> None:
    poor = QualityRecord(
        relative_error=1.0, sqnr_db=0.0, worst_head_sqnr_db=None, max_error=1.0, amax=1.0, head_amax_ratio=None
    )
    assert not is_below(poor, None)
    assert is_below(poor, 28.0)


def test_the_floor_is_the_worst_heads() -> None:
    """Signal to noise is 4000 (36 dB) for the whole weight and 4 (6 dB) for its second head, by hand."""
    weight = torch.full((4, 2), 1000.0)
    weight[2:] = 2.0
    stored = weight.clone()
    stored[2:] += 1.0
    stored[:2] += 22.3
    found = measure(fp32(weight), fp32(stored), heads=2, name="w")
    signal, noise = 4 * (1000.0**2 + 2.0**2), 4 * (22.3**2 + 1.0)
    assert found.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=0.01)
    assert found.worst_head_sqnr_db == pytest.approx(10 * math.log10(4), abs=0.001)
    assert is_below(found, 28.0)
    assert not is_below(found, 6.0)
    assert not is_below(measure(fp32(weight), fp32(stored), heads=None, name="w"), 28.0)


def test_a_head_without_noise_is_not_the_worst() -> None:
    weight = torch.ones(4, 2)
    weight[2:] = 0.0
    stored = weight.clone()
    stored[:2] = 1.5
    found = measure(fp32(weight), fp32(stored), heads=2, name="w")
    assert found.worst_head_sqnr_db == pytest.approx(10 * math.log10(4), abs=0.001)
    assert measure(fp32(weight), fp32(weight.clone()), heads=2, name="w").worst_head_sqnr_db is None


def test_noise_in_a_head_of_zeros_misses_every_floor() -> None:
    weight = torch.ones(4, 2)
    weight[2:] = 0.0
    stored = weight.clone()
    stored[2:] = 1e-6
    assert is_below(measure(fp32(weight), fp32(stored), heads=2, name="w"), -100.0)
