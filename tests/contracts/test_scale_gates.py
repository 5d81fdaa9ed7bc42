"""How group scales reach the GEMM, by release and target; tests/engines holds the table against sglang's own code."""

from __future__ import annotations

import pytest

from weightprep.contracts.scale_gates import predict_scales
from weightprep.errors import EngineError


@pytest.mark.parametrize(
    ("version", "today", "prepared"),
    [
        ("0.5.12", False, False),
        ("0.5.15", False, True),
        ("0.5.18", False, True),
        ("0.5.20", False, True),
        ("0.5.22", True, True),
        ("0.5.23", True, True),
    ],
)
def test_what_is_transposed_and_what_is_mended(version: str, today: bool, prepared: bool) -> None:
    found = predict_scales("gfx950", version)
    assert found is not None
    assert (found[0].fast, found[1].fast) == (today, prepared)


def test_other_targets_read_rows() -> None:
    assert predict_scales("sm90", "0.5.23") is None
    assert predict_scales("gfx942", "0.5.15") is None


def test_a_release_without_plugins_is_an_error() -> None:
    with pytest.raises(EngineError):
        predict_scales("gfx950", "0.5.10")
