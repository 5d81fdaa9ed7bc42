"""What is said at startup about aiter's transposed scales, for producers of every behaviour."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

from weightprep.engines.sglang.scale_check import report_scale_producers, scale_producers
from weightprep.runtime.scale_probe import group_arguments


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    return x, x.float().view(rows, columns // 128, 128).abs().amax(dim=2) / 448


def transposed(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    q, scale = quantize(x)
    return q, scale.t().contiguous().view(scale.shape) if transpose_scale else scale


def strided(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    q, scale = quantize(x)
    return q, scale.t().contiguous().t() if transpose_scale else scale


def ignoring(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    return quantize(x)


def shuffled(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    q, scale = quantize(x)
    return q, scale.flip(0) if transpose_scale else scale


@pytest.mark.parametrize(
    ("function", "sound"),
    [(transposed, True), (strided, True), (quantize, False), (ignoring, False), (shuffled, False)],
)
def test_only_a_view_that_sglang_reads_right_is_sound(
    function: Any, sound: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="weightprep"):
        (report,) = report_scale_producers({"aiter.f": (function, group_arguments())}, "cpu")
    assert report.sound is sound
    # The oracle: sglang's own view of what it asked for, beside the row-major scales.
    if function is not quantize:
        x = torch.randn(4, 384, generator=torch.Generator().manual_seed(0))
        scale = function(x, transpose_scale=True)[1]
        assert torch.equal(scale.as_strided(scale.shape, (1, scale.shape[0])), quantize(x)[1]) is sound
    assert [record.levelname for record in caplog.records] == ["INFO" if sound else "WARNING"]


def test_producers_are_those_that_the_installed_aiter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = types.ModuleType("aiter.ops.triton.fused_fp8_quant")
    triton.fused_flatten_fp8_group_quant = lambda x, group_size, dtype_quant: quantize(x.flatten(1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter.ops.triton.fused_fp8_quant", triton)
    monkeypatch.setitem(sys.modules, "aiter.ops.quant", types.ModuleType("aiter.ops.quant"))
    producers = scale_producers()
    assert list(producers) == ["aiter.ops.triton.fused_fp8_quant.fused_flatten_fp8_group_quant"]
    (report,) = report_scale_producers(producers, "cpu")
    assert "absent or without effect" in report.found
