"""What is said at startup about aiter's transposed scales, for producers of every behaviour."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

from weightprep.engines.sglang import scale_hooks
from weightprep.engines.sglang.scale_check import probe_producers, scale_producers, start_scales
from weightprep.engines.sglang.scale_hooks import CLAMP, FLATTEN, GROUP, RMS, ScaleSite, hook_scale_sites
from weightprep.runtime import witness
from weightprep.runtime.scale_layout import GroupScaleLayout
from weightprep.runtime.scale_probe import (
    ScaleProducer,
    TransposeScale,
    clamp_arguments,
    group_arguments,
    probe_producer,
)


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
        (report,) = probe_producers({"aiter.f": (function, group_arguments())}, "cpu")
        assert start_scales({"aiter.f": (function, group_arguments())}, "cpu", "upstream") == ()
    assert report.sound is sound
    # The oracle: sglang's own view of what it asked for, beside the row-major scales.
    if function is not quantize:
        x = torch.randn(4, 384, generator=torch.Generator().manual_seed(0))
        scale = function(x, transpose_scale=True)[1]
        assert torch.equal(scale.as_strided(scale.shape, (1, scale.shape[0])), quantize(x)[1]) is sound
    assert [record.levelname for record in caplog.records] == ["INFO" if sound else "WARNING", "INFO"]
    assert "group scales as upstream: the option runtime is upstream" in caplog.text


def test_producers_are_those_that_the_installed_aiter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = types.ModuleType("aiter.ops.triton.fused_fp8_quant")
    triton.fused_flatten_fp8_group_quant = lambda x, group_size, dtype_quant: quantize(x.flatten(1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter.ops.triton.fused_fp8_quant", triton)
    monkeypatch.setitem(sys.modules, "aiter.ops.quant", types.ModuleType("aiter.ops.quant"))
    monkeypatch.setitem(sys.modules, "aiter.ops.triton.fusions.fused_clamp_act_mul", types.ModuleType("clamp"))
    producers = scale_producers()
    assert list(producers) == [FLATTEN]
    (report,) = probe_producers(producers, "cpu")
    assert "absent or without effect" in report.found


def clamped(x: torch.Tensor, *, dtype_quant: Any = None, transpose_scale: bool = False, **_: Any) -> Any:
    """Shaped like aiter's fused_clamp_act_mul: one tensor, or a pair if it quantizes."""
    gate, up = x.chunk(2, dim=1)
    y = torch.nn.functional.silu(gate) * up
    return y if dtype_quant is None else transposed(y, transpose_scale)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of sglang with one call site for each producer."""
    module = types.ModuleType("site")
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization.fp8_utils", module)
    module.materialize_bpreshuffle_fp8_scale = lambda scale: scale.t().contiguous().t()  # type: ignore[attr-defined]
    name = "sglang.srt.layers.quantization.fp8_utils"
    sites = tuple(ScaleSite(name, producer, producer) for producer in (RMS, FLATTEN, GROUP, CLAMP))
    monkeypatch.setattr(scale_hooks, "SITES", sites)
    witness.reset()
    return module


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("function", [transposed, strided])
def test_a_hooked_call_site_gets_columns_whatever_it_asks_for(
    site: types.ModuleType, function: Any, asked: bool
) -> None:
    setattr(site, RMS, function)
    (hooked,) = hook_scale_sites({RMS: probe_producer(function, group_arguments(), device="cpu")})
    assert hooked.producer == RMS
    x = torch.randn(4, 384, generator=torch.Generator().manual_seed(0))
    _, scale = getattr(site, RMS)(x, transpose_scale=asked)
    assert GroupScaleLayout.COLUMN.holds(scale)
    assert torch.equal(scale, quantize(x)[1])
    # both of sglang's ways with it: its copy, which now copies nothing, and its view
    assert site.materialize_bpreshuffle_fp8_scale(scale).data_ptr() == scale.data_ptr()
    assert torch.equal(scale.as_strided(scale.shape, (1, 4)), quantize(x)[1])
    getattr(site, RMS)(x[:1], transpose_scale=asked)
    assert witness.counts() == {f"group_scale/{RMS}/column_major": 1, f"group_scale/{RMS}/one_row": 1}


def test_a_producer_without_columns_is_replaced_or_left_and_named(site: types.ModuleType) -> None:
    x = torch.randn(4, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in (RMS, FLATTEN, GROUP):
        setattr(site, name, ignoring)
    hook_scale_sites({name: ScaleProducer(ignoring, TransposeScale.ROW_ONLY) for name in (RMS, FLATTEN, GROUP)})
    fp8 = torch.float8_e4m3fn
    _, flat = getattr(site, FLATTEN)(x.view(4, 3, 128), group_size=128, dtype_quant=fp8, transpose_scale=True)
    _, group = getattr(site, GROUP)(x, quant_dtype=fp8)
    for scale in (flat, group):
        assert GroupScaleLayout.COLUMN.holds(scale)
        torch.testing.assert_close(scale, quantize(x)[1], rtol=1e-6, atol=0.0)
    assert torch.equal(getattr(site, RMS)(x)[1], quantize(x)[1])
    assert witness.declined() == {(f"group_scale/{RMS}", "this aiter has no column-major output of it"): 1}


LACKS = "this aiter has no column-major output of it"
FLAT = f"{LACKS}, and weightprep's takes heads in whole groups of 128, to fp8"
GROUPED = f"{LACKS}, and weightprep's takes contiguous rows in whole groups of 128, to fp8"
UNKNOWN = f"{LACKS}, and weightprep's does not know "
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("producer", "arguments", "keywords", "reason"),
    [
        (FLATTEN, (), {"group_size": 64, "dtype_quant": FP8}, FLAT),
        (FLATTEN, (128,), {}, FLAT),
        (FLATTEN, (128, FP8), {"fresh": 1}, f"{UNKNOWN}fresh"),
        (FLATTEN, (128, FP8, True), {}, f"{UNKNOWN}further arguments by position"),
        (FLATTEN, (128, FP8), {}, None),
        (GROUP, (), {}, GROUPED),
        (GROUP, (), {"quant_dtype": torch.int8}, GROUPED),
        (GROUP, (), {"quant_dtype": FP8, "group_size": 32}, GROUPED),
        (GROUP, (), {"quant_dtype": FP8, "scale": torch.ones(1)}, f"{UNKNOWN}scale"),
        (GROUP, (), {"quant_dtype": FP8, "num_rows": torch.ones(1), "num_rows_factor": 2}, f"{UNKNOWN}num_rows"),
        (GROUP, (), {"quant_dtype": FP8, "scale_type": torch.float8_e8m0fnu}, f"{UNKNOWN}scale_type"),
        (GROUP, (None, FP8), {}, None),
        (
            GROUP,
            (),
            {"quant_dtype": FP8, "scale": None, "group_size": 128, "num_rows": None, "num_rows_factor": 1},
            None,
        ),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"transpose_scale": True}], ids=["", "transposed"])
def test_a_substitute_takes_what_aiters_function_takes_or_leaves_the_call_to_it(
    site: types.ModuleType,
    producer: str,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    reason: str | None,
    asked: dict[str, bool],
) -> None:
    calls = []
    setattr(site, producer, lambda *given, **named: calls.append((given, named)) or "aiter's own")
    hook_scale_sites({producer: ScaleProducer(ignoring, TransposeScale.ROW_ONLY)})
    x = torch.randn(4, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = x.view(4, 3, 128) if producer == FLATTEN else x
    result = getattr(site, producer)(given, *arguments, **keywords, **asked)
    path = f"group_scale/{producer}"
    if reason is None:
        assert GroupScaleLayout.COLUMN.holds(result[1])
        torch.testing.assert_close(result[1], quantize(x)[1], rtol=1e-6, atol=0.0)
        assert not calls
        assert not witness.declined()
        assert witness.counts()[f"{path}/weightprep"] == 1
        return
    assert result == "aiter's own"
    # as the caller gave them: an aiter without the parameter cannot be handed one
    assert calls == [((given, *arguments), keywords | asked)]
    assert witness.declined() == {(path, reason): 1}
    assert not witness.counts()


def test_shapes_that_a_substitute_cannot_take_are_left_to_aiter(site: types.ModuleType) -> None:
    for producer in (FLATTEN, GROUP):
        setattr(site, producer, lambda *_, **__: "aiter's own")
    hook_scale_sites({p: ScaleProducer(ignoring, TransposeScale.ROW_ONLY) for p in (FLATTEN, GROUP)})
    x = torch.zeros((4, 384), dtype=torch.bfloat16)
    for odd in (x, x.view(4, 2, 192)):
        assert getattr(site, FLATTEN)(odd, 128, FP8) == "aiter's own"
    for odd in (x[:, :192], x.view(4, 3, 128), x.t().contiguous().t()):
        assert getattr(site, GROUP)(odd, quant_dtype=FP8) == "aiter's own"
    assert witness.declined() == {(f"group_scale/{FLATTEN}", FLAT): 2, (f"group_scale/{GROUP}", GROUPED): 3}


def test_an_activation_that_is_not_quantized_passes_through(site: types.ModuleType) -> None:
    setattr(site, CLAMP, clamped)
    fp8 = torch.float8_e4m3fn
    hook_scale_sites({CLAMP: probe_producer(clamped, clamp_arguments(dtype_quant=fp8), device="cpu")})
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(getattr(site, CLAMP)(x), clamped(x))
    _, scale = getattr(site, CLAMP)(x, dtype_quant=fp8)
    assert torch.equal(scale, clamped(x, dtype_quant=fp8)[1])
    assert GroupScaleLayout.COLUMN.holds(scale)
    assert witness.counts() == {f"group_scale/{CLAMP}/column_major": 1}


def test_startup_hooks_and_says_so(site: types.ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    setattr(site, RMS, strided)
    with caplog.at_level(logging.INFO, logger="weightprep"):
        assert [hooked.producer for hooked in start_scales({RMS: (strided, group_arguments())}, "cpu", "auto")] == [RMS]
        again = start_scales({RMS: (strided, group_arguments())}, "cpu", "auto")
    assert [hooked.producer for hooked in again] == [RMS]
    assert getattr(site, RMS).weightprep_original is strided
    assert "group scales column-major without a copy: fused_rms_fp8_group_quant in 1 module(s)" in caplog.text


def test_a_release_that_transposes_in_its_linear_layer_is_left_alone(
    site: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    del site.materialize_bpreshuffle_fp8_scale
    setattr(site, RMS, strided)
    with caplog.at_level(logging.INFO, logger="weightprep"):
        assert start_scales({RMS: (strided, group_arguments())}, "cpu", "auto") == ()
    assert getattr(site, RMS) is strided
    assert "group scales as upstream: this sglang has none of the call sites" in caplog.text
