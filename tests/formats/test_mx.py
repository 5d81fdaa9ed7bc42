"""The scale rules of MXFP4 against their definitions in exact arithmetic, and whole groups against a scalar oracle."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from weightprep.formats.mx import ScaleRule, dequantize_mxfp4, group_exponent, quantize_mxfp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RULES: tuple[ScaleRule, ...] = ("even", "floor", "ceil", "rceil")


def exponent_by_definition(amax: float, rule: str) -> int:
    """From the words of each rule, in exact arithmetic."""
    if amax == 0:
        return -127
    exact = Fraction(amax)
    floor_log2 = math.frexp(amax)[1] - 1
    is_power = exact == Fraction(2) ** floor_log2
    exponent = {
        "floor": floor_log2 - 2,
        # rounded to one mantissa bit, half away from zero, before the floor
        "even": floor_log2 + (exact >= Fraction(7, 4) * Fraction(2) ** floor_log2) - 2,
        "ceil": floor_log2 + (not is_power) - 2,
        # the smallest power of two under which amax is at most 6
        "rceil": next(e for e in range(floor_log2 - 4, floor_log2 + 1) if exact <= 6 * Fraction(2) ** e),
    }[rule]
    return max(exponent, -127)


@pytest.mark.parametrize("rule", RULES)
def test_exponents_by_definition(rule: ScaleRule) -> None:
    rng = np.random.default_rng(1)
    mantissas = np.concatenate([[1, 1.5, 1.75, 1.25], 1 + rng.random(200), np.nextafter([1, 1.5, 1.75], 0)])
    exponents = [-149, -130, -127, -126, -125, -124, -3, 0, 1, 100, 126]
    amax = np.unique(np.array([m * 2.0**e for m in mantissas for e in exponents], dtype=np.float32))
    amax = np.concatenate([[0], amax, np.nextafter(np.float32([1.5, 1.75, 6, 7]), np.float32(99))]).astype(np.float32)
    ours = group_exponent(torch.from_numpy(amax), rule).tolist()
    assert ours == [exponent_by_definition(float(value), rule) for value in amax]


@pytest.mark.parametrize(
    ("amax", "even", "floor", "ceil", "rceil"),
    [
        (1.7, -2, -2, -1, -1),
        (1.75, -1, -2, -1, -1),
        (3.0, -1, -1, 0, -1),
        (3.5, 0, -1, 0, 0),
        (6.5, 0, 0, 1, 1),
        (7.0, 1, 0, 1, 1),
        (6.0, 0, 0, 1, 0),
        (0.0, -127, -127, -127, -127),
    ],
)
def test_exponents_that_libraries_disagree_on(amax: float, even: int, floor: int, ceil: int, rceil: int) -> None:
    found = {rule: group_exponent(torch.tensor(amax), rule).item() for rule in RULES}
    assert found == {"even": even, "floor": floor, "ceil": ceil, "rceil": rceil}


def quantize_by_definition(values: np.ndarray, rule: str) -> tuple[list[int], int]:
    """Codes and scale byte of one group, nearest value by search, ties to the even code."""
    exponent = exponent_by_definition(float(np.abs(values).max()), rule)
    codes = []
    for value in values.astype(np.float64):
        scaled = abs(value) / 2.0**exponent
        nearest = min(range(8), key=lambda code: (abs(E2M1[code] - scaled), code % 2))
        codes.append(nearest | (8 if np.signbit(value) else 0))
    return codes, exponent + 127


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("power", [-140, -127, -120, 0, 100, 125])
def test_groups_against_a_scalar_oracle(rule: ScaleRule, power: int) -> None:
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((6, 64)) * 2.0**power).astype(np.float32)
    values[0, :32] = 0
    values[1, 3] = -0.0
    # many elements exactly on ties, as fp8 sources give them
    values[2] = rng.integers(-28, 29, 64).astype(np.float32) * np.float32(2.0 ** max(power - 2, -149))
    packed, scale = quantize_mxfp4(torch.from_numpy(values), rule)
    for row in range(6):
        for group in range(2):
            codes, byte = quantize_by_definition(values[row, 32 * group : 32 * group + 32], rule)
            ours = packed[row, 16 * group : 16 * group + 16].numpy()
            assert [int(code) for pair in ours for code in (pair & 15, pair >> 4)] == codes
            assert int(scale[row, group]) == byte


def test_power_of_two_groups_survive_a_round_trip_and_requantization() -> None:
    values = torch.randn(8, 192, generator=torch.Generator().manual_seed(3))
    packed, scale = quantize_mxfp4(values)
    once = dequantize_mxfp4(packed, scale)
    # the largest element may have been rounded up to a power of two; the scale then changes and the numbers do not
    again, scale_again = quantize_mxfp4(once)
    assert torch.equal(dequantize_mxfp4(again, scale_again), once)


def test_shapes_and_leading_dimensions() -> None:
    packed, scale = quantize_mxfp4(torch.zeros(2, 3, 96))
    assert (tuple(packed.shape), tuple(scale.shape)) == ((2, 3, 48), (2, 3, 3))
    assert packed.dtype is scale.dtype is torch.uint8
    assert not packed.any()
    assert not scale.any()
