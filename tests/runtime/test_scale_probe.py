"""The probe tells apart what aiter versions do with transpose_scale; the wrapper gives one truth for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiter_wheel import WHEEL, unpacked

from weightprep.errors import EngineError
from weightprep.runtime.scale_layout import GroupScaleLayout
from weightprep.runtime.scale_probe import TransposeScale, group_arguments, probe_producer, rms_arguments

COLUMN, ROW = GroupScaleLayout.COLUMN, GroupScaleLayout.ROW


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-major group quantization, the core of the stand-ins below."""
    rows, columns = x.shape
    scale = x.float().view(rows, columns // 128, 128).abs().amax(dim=2) / 448
    return (x.float() / scale.repeat_interleave(128, dim=1)).to(torch.float8_e4m3fn), scale


def transposed_bytes(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    """The older contract: the bytes of the transpose in a tensor that looks row-major."""
    q, scale = quantize(x)
    return q, scale.t().contiguous().view(scale.shape) if transpose_scale else scale


def strided_view(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    """The newer contract: a view with strides (1, rows)."""
    q, scale = quantize(x)
    return q, scale.t().contiguous().t() if transpose_scale else scale


def without_parameter(x: torch.Tensor) -> Any:
    return quantize(x)


def ignoring(x: torch.Tensor, **anything: object) -> Any:
    return quantize(x)


def nested(x: torch.Tensor, weight: torch.Tensor, eps: float, transpose_scale: bool = False) -> Any:
    """Shaped like aiter's fused RMSNorm: ((q, scale), normed, second, residual)."""
    y = x.float() * torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + eps) * weight.float()
    return transposed_bytes(y, transpose_scale), y, None, None


CASES = [
    (transposed_bytes, TransposeScale.TRANSPOSED_BYTES),
    (strided_view, TransposeScale.STRIDED_VIEW),
    (without_parameter, TransposeScale.ROW_ONLY),
    (ignoring, TransposeScale.ROW_ONLY),
]


@pytest.mark.parametrize(("function", "behaviour"), CASES, ids=lambda c: getattr(c, "__name__", None))
def test_each_behaviour_is_recognized(function: Callable[..., Any], behaviour: TransposeScale) -> None:
    assert probe_producer(function, group_arguments(), device="cpu").behaviour is behaviour


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("layout", GroupScaleLayout)
@pytest.mark.parametrize("function", [f for f, _ in CASES], ids=lambda f: f.__name__)
def test_the_wrapper_gives_the_same_scales_in_the_layout_asked_for(
    function: Callable[..., Any], layout: GroupScaleLayout, rows: int
) -> None:
    producer = probe_producer(function, group_arguments(), device="cpu")
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    q, scale = producer(x, layout=layout)
    want_q, want_scale = quantize(x)
    assert layout.holds(scale)
    assert torch.equal(scale, want_scale)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))


def test_a_nested_result_keeps_its_other_members() -> None:
    producer = probe_producer(nested, rms_arguments(), device="cpu")
    assert producer.behaviour is TransposeScale.TRANSPOSED_BYTES
    x = torch.randn(4, 256).to(torch.bfloat16)
    weight = torch.ones(256, dtype=torch.bfloat16)
    (q, scale), normed, second, residual = producer(x, weight, 1e-6, layout=COLUMN)
    assert COLUMN.holds(scale)
    assert torch.equal(scale, quantize(normed)[1])
    assert torch.equal(q.view(torch.uint8), quantize(normed)[0].view(torch.uint8))
    assert (second, residual) == (None, None)


def test_no_copy_is_made_where_the_producer_can_write_columns() -> None:
    returned: list[torch.Tensor] = []

    def spy(x: torch.Tensor, transpose_scale: bool = False) -> Any:
        q, scale = transposed_bytes(x, transpose_scale)
        returned.append(scale)
        return q, scale

    producer = probe_producer(spy, group_arguments(), device="cpu")
    _, scale = producer(torch.randn(6, 256), layout=COLUMN)
    assert scale.data_ptr() == returned[-1].data_ptr()


def shuffled(x: torch.Tensor, transpose_scale: bool = False) -> Any:
    q, scale = quantize(x)
    return q, scale.flip(0) if transpose_scale else scale


def transposed_unasked(x: torch.Tensor, transpose_scale: bool = True) -> Any:
    return transposed_bytes(x, transpose_scale)


def transposed_always(x: torch.Tensor) -> Any:
    return transposed_bytes(x, True)


def nested_unasked(x: torch.Tensor, weight: torch.Tensor, eps: float, transpose_scale: bool = True) -> Any:
    return nested(x, weight, eps, transpose_scale)


def constant(x: torch.Tensor) -> Any:
    return x, torch.ones(3, 2)


def no_scale(x: torch.Tensor) -> Any:
    return x, None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (shuffled, r"transpose_scale of \S*shuffled"),
        (constant, "do not follow the values"),
        (no_scale, "NoneType"),
        (transposed_unasked, "without being asked"),
        (transposed_always, "without being asked"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        probe_producer(function, group_arguments(), device="cpu")


def test_behind_a_norm_an_order_that_was_not_asked_for_is_refused_too() -> None:
    with pytest.raises(EngineError, match="without being asked"):
        probe_producer(nested_unasked, rms_arguments(), device="cpu")


def test_a_strided_view_that_was_not_asked_for_tells_its_order_and_is_taken() -> None:
    producer = probe_producer(lambda x, transpose_scale=True: strided_view(x, True), group_arguments(), device="cpu")
    x = torch.randn(4, 256).to(torch.bfloat16)
    for layout in GroupScaleLayout:
        _, scale = producer(x, layout=layout)
        assert layout.holds(scale)
        assert torch.equal(scale, quantize(x)[1])


def test_the_producers_of_the_released_aiter() -> None:
    """0.1.7 writes transposed bytes behind row-major strides in one producer, and lacks the parameter in another."""
    folder = unpacked()
    if folder is None:
        pytest.skip(f"pip could not fetch {WHEEL}: the probe is shown on stand-ins alone")
    script = [sys.executable, str(Path(__file__).with_name("probe_aiter.py")), str(folder)]
    run = subprocess.run(script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["rms"] == "TRANSPOSED_BYTES"
    assert report["flatten"] == "ROW_ONLY"
    for layout in GroupScaleLayout:
        found = report[layout.value]
        assert found["holds"], layout
        # The same formula on both sides, but the sums of squares are added in another order, and where a kernel is
        # compiled aiter's divisions are not correctly rounded. Of bf16 inputs many land on a tie of e4m3, and those
        # may go either way: seen 0.3 % on an H200, to the neighbouring code.
        assert found["scale_difference"] < 1e-6
        assert found["bytes_differ"] < 1e-2
        assert found["codes_apart"] <= 1
