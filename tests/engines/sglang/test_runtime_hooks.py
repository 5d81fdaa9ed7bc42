"""The replacements of sglang's absorbed products alone; test_hooks_in_releases compares them with sglang's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightprep.engines.sglang import runtime_hooks
from weightprep.engines.sglang.versions import installed_root
from weightprep.errors import EngineError
from weightprep.runtime import witness
from weightprep.runtime.choice import Backend
from weightprep.runtime.scale_layout import GroupScaleLayout


def test_the_installed_sglang_has_what_we_hook() -> None:
    root = installed_root()
    assert root is not None
    rocm = [hook.target.rsplit(".", 1)[1] for hook in runtime_hooks.runtime_hooks(root, hip=True)]
    assert rocm == ["rocm_absorb_q_bmm", "rocm_absorb_v_bmm", "fused_fp8_bmm_rope_cat_and_cache_mla"]
    assert [hook.target.rsplit(".", 1)[1] for hook in runtime_hooks.runtime_hooks(root, hip=False)] == ["bmm_fp8"]


def never(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("upstream was called")


def test_mxfp4_weights_for_every_o_proj() -> None:
    heads, k, v, m = 2, 512, 256, 3
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (heads, v, k // 2), generator=generator, dtype=torch.uint8).transpose(1, 2)
    powers = torch.randint(120, 125, (heads, v, k // 32), generator=generator, dtype=torch.uint8).transpose(1, 2)
    x = torch.randn((m, heads, k), generator=generator).bfloat16()
    results = {}
    for dtype, extra in (
        (torch.bfloat16, {}),
        (torch.uint8, {}),
        (torch.float8_e4m3fn, {"weight_scale": torch.ones(2, 4)}),
    ):
        o_proj = SimpleNamespace(weight=torch.zeros(1, dtype=dtype), **extra)
        attn = SimpleNamespace(
            w_vc=packed, w_scale_v=powers, w_scale=1.0, o_proj=o_proj, kv_b_proj=SimpleNamespace(set_lora=False)
        )
        results[dtype] = runtime_hooks.rocm_absorb_v(never, attn, x)
    assert results[torch.bfloat16].shape == (m, heads * v)
    values, scales = results[torch.uint8]
    assert (values.shape, scales.shape) == ((m, heads * v // 2), (m, heads * v // 32))
    assert GroupScaleLayout.COLUMN.holds(scales)
    values, scales = results[torch.float8_e4m3fn]
    dequantized = values.float() * scales.repeat_interleave(128, dim=1)
    assert (dequantized - results[torch.bfloat16].float()).norm() < 0.03 * dequantized.norm()

    kernel_out = torch.full((heads, m, v), float("nan"), dtype=torch.bfloat16)
    returned = runtime_hooks.aiter_mxfp4_kernel(
        never, x.transpose(0, 1), packed.transpose(1, 2), powers.transpose(1, 2), torch.bfloat16, kernel_out
    )
    assert returned is kernel_out
    assert torch.equal(kernel_out.transpose(0, 1).flatten(1), results[torch.bfloat16])
    assert kernel_out.transpose(0, 1).flatten(1, 2).data_ptr() == kernel_out.data_ptr()


@pytest.mark.parametrize("bpreshuffle", [True, False])
def test_block_scales_lie_where_the_gemm_of_this_gpu_reads_them(
    bpreshuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.models.deepseek_common import utils

    monkeypatch.setattr(utils, "_use_aiter_bpreshuffle_gfx95", bpreshuffle, raising=False)
    attn = attention_with("fp8", torch.float8_e4m3fn)
    attn.w_vc = (torch.randn((2, 256, 512)) * 30).to(torch.float8_e4m3fn).transpose(1, 2)
    attn.o_proj.weight_scale = torch.ones(2, 4)
    x = torch.randn((3, 2, 512)).bfloat16()
    values, scales = runtime_hooks.rocm_absorb_v(never, attn, x)
    assert scales.stride() == ((1, 3) if bpreshuffle else (4, 1))
    wanted = torch.bmm(x.double().transpose(0, 1), attn.w_vc.double()).transpose(0, 1).flatten(1)
    dequantized = values.double() * scales.double().repeat_interleave(128, dim=1)
    assert (dequantized - wanted).norm() < 0.03 * wanted.norm()


def test_bmm_fp8_of_cuda_is_batch_major_and_exact() -> None:
    heads, m, k, n = 3, 5, 512, 128
    a = (torch.randn(heads, m, k) * 30).to(torch.float8_e4m3fn)
    b = (torch.randn(heads, n, k) * 30).to(torch.float8_e4m3fn).transpose(1, 2)
    a_scale, b_scale = torch.tensor([0.011]), torch.tensor([0.007])
    out = runtime_hooks.cuda_bmm_fp8(never, a, b, a_scale, b_scale, torch.bfloat16)
    assert out.shape == (heads, m, n)
    assert out.transpose(0, 1).flatten(1, 2).data_ptr() == out.data_ptr()
    wanted = torch.bmm(a.double(), b.double()) * a_scale.double() * b_scale.double()
    # one rounding to bf16, and float32 sums of 512 terms
    assert ((out.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-4 * wanted.abs().max()).all()


def test_what_stays_with_upstream_is_named() -> None:
    witness.reset()
    marker = torch.zeros(1)
    attn = SimpleNamespace(w_kc=torch.zeros((2, 192, 512), dtype=torch.float8_e4m3fn), w_scale=torch.ones(2))
    assert runtime_hooks.rocm_absorb_q(lambda *_, **__: marker, attn, torch.zeros(1), is_capture_mode=True) is marker
    assert runtime_hooks.fused_rope(lambda *_, **__: marker, 1, two=2) is marker
    assert runtime_hooks.cuda_bmm_fp8(lambda *_: marker, marker, marker, marker, 1.0, torch.bfloat16) is marker
    assert list(witness.declined()) == [
        ("rocm_absorb_q_bmm", "the scale is not one float32 on the device"),
        ("rocm_absorb_q_bmm", "upstream's fused absorb, rope and cache kernel took the call"),
        ("bmm_fp8", "the weight is torch.float32, for which upstream's torch.bmm is the fast path"),
    ]


def test_a_bf16_weight_is_written_batch_major_where_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn((3, 2, 512)).bfloat16()
    w_vc = torch.randn((2, 256, 512)).bfloat16().transpose(1, 2)
    attn = SimpleNamespace(
        w_vc=w_vc,
        w_scale=1.0,
        o_proj=SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16)),
        kv_b_proj=SimpleNamespace(set_lora=False),
    )
    for backend in (Backend.AUTO, Backend.TORCH):
        monkeypatch.setattr(runtime_hooks, "_backend", backend)
        out = runtime_hooks.rocm_absorb_v(never, attn, x)
        wanted = torch.bmm(x.double().transpose(0, 1), w_vc.double()).transpose(0, 1).flatten(1)
        assert out.is_contiguous()
        assert ((out.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-5 * wanted.abs().max()).all()


@pytest.mark.parametrize(("rows", "stays"), [(4, False), (64, False), (65, True)])
def test_q_with_many_rows_stays_with_upstream_unless_a_runtime_is_named(
    rows: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = torch.zeros(1)
    w_kc = torch.zeros((2, 512, 192), dtype=torch.float8_e4m3fn).transpose(1, 2)
    attn = SimpleNamespace(w_kc=w_kc, w_scale=torch.ones(()))
    q = torch.zeros((rows, 2, 192), dtype=torch.bfloat16)
    for backend in (Backend.AUTO, Backend.TORCH):
        monkeypatch.setattr(runtime_hooks, "_backend", backend)
        witness.reset()
        out = runtime_hooks.rocm_absorb_q(lambda *_, **__: marker, attn, q, is_capture_mode=False)
        assert (out is marker) == (stays and backend is Backend.AUTO)
        reason = ("rocm_absorb_q_bmm", "with this many rows upstream's fp8 kernel is the faster one")
        assert (reason in witness.declined()) == (out is marker)


def test_bmm_fp8_beyond_the_measured_rows_stays_with_upstream() -> None:
    a, b = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in ((1, 257, 512), (1, 512, 128)))
    marker, one = torch.zeros(1), torch.ones(1)
    assert runtime_hooks.cuda_bmm_fp8(lambda *_: marker, a, b, one, one, torch.bfloat16) is marker


MARKER = torch.zeros(1)
NOT_AITERS = "aiter was named, whose fp8 kernel takes fp8 weights and writes bf16"


def upstream(*_: object, **__: object) -> torch.Tensor:
    return MARKER


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def attention_with(weight: str, o_proj: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """K and N are 512 for both products."""
    w = {
        "fp8": torch.zeros((2, 512, 512), dtype=torch.float8_e4m3fn),
        "bf16": torch.zeros((2, 512, 512), dtype=torch.bfloat16),
        "mxfp4": torch.zeros((2, 256, 512), dtype=torch.uint8),
    }[weight]
    powers = torch.full((2, 16, 512), 127, dtype=torch.uint8)
    return SimpleNamespace(
        w_kc=w,
        w_vc=w,
        w_scale=torch.ones(()) if weight == "fp8" else 1.0,
        w_scale_k=powers,
        w_scale_v=powers,
        o_proj=SimpleNamespace(weight=torch.zeros(1, dtype=o_proj)),
        kv_b_proj=SimpleNamespace(set_lora=False),
    )


def test_what_aiter_cannot_take_stays_with_upstream_when_aiter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_hooks, "_backend", Backend.AITER)
    x = torch.zeros((3, 2, 512), dtype=torch.bfloat16)
    witness.reset()
    assert runtime_hooks.rocm_absorb_q(upstream, attention_with("mxfp4"), x) is MARKER
    for attn in (attention_with("mxfp4"), attention_with("bf16"), attention_with("fp8", torch.uint8)):
        assert runtime_hooks.rocm_absorb_v(upstream, attn, x) is MARKER
    packed, powers = torch.zeros((2, 512, 256), dtype=torch.uint8), torch.zeros((2, 512, 16), dtype=torch.uint8)
    assert runtime_hooks.aiter_mxfp4_kernel(upstream, x.transpose(0, 1), packed, powers) is MARKER
    one = torch.ones(1)
    assert runtime_hooks.cuda_bmm_fp8(upstream, fp8(2, 3, 512), fp8(2, 512, 128), one, one, torch.bfloat16) is MARKER
    assert not witness.counts()
    assert witness.declined() == {
        ("rocm_absorb_q_bmm", NOT_AITERS): 1,
        ("rocm_absorb_v_bmm", NOT_AITERS): 3,
        (runtime_hooks._MXFP4_PATH, NOT_AITERS): 1,
        ("bmm_fp8", "aiter was named, which has no kernel for activations that are already fp8"): 1,
    }


@pytest.mark.parametrize("rows", [3, 257])
def test_bmm_fp8_runs_the_runtime_that_was_named(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(runtime_hooks, "absorb_into", lambda *_, backend, **__: asked.append(backend))
    one = torch.ones(1)
    for backend in (Backend.TRITON, Backend.TORCH):
        monkeypatch.setattr(runtime_hooks, "_backend", backend)
        runtime_hooks.cuda_bmm_fp8(never, fp8(1, rows, 512), fp8(1, 512, 128), one, one, torch.bfloat16)
    assert asked == [Backend.TRITON, Backend.TORCH]


def test_mxfp4_weights_have_no_row_limit() -> None:
    out = runtime_hooks.rocm_absorb_q(never, attention_with("mxfp4"), torch.zeros((65, 2, 512)).bfloat16())
    assert out.shape == (2, 65, 512)


def test_a_bf16_weight_that_has_a_scale_stays_with_upstream() -> None:
    attn = attention_with("bf16")
    attn.w_scale = torch.ones(())
    assert runtime_hooks.rocm_absorb_v(upstream, attn, torch.zeros((3, 2, 512)).bfloat16()) is MARKER


def test_bmm_fp8_into_a_given_buffer_or_another_dtype_stays_with_upstream() -> None:
    operands = fp8(1, 3, 512), fp8(1, 512, 128), torch.ones(1), torch.ones(1)
    buffer = torch.zeros((1, 3, 128), dtype=torch.bfloat16)
    assert runtime_hooks.cuda_bmm_fp8(upstream, *operands, torch.bfloat16, buffer) is MARKER
    assert runtime_hooks.cuda_bmm_fp8(upstream, *operands, torch.float16) is MARKER
    a, b, _, one = operands
    assert runtime_hooks.cuda_bmm_fp8(upstream, a, b, torch.ones(3), one, torch.bfloat16) is MARKER
    assert runtime_hooks.cuda_bmm_fp8(never, *operands, torch.bfloat16).shape == (1, 3, 128)


def test_aiters_fp8_kernel_with_a_bias_or_another_dtype_stays_with_upstream() -> None:
    x, w, one = torch.zeros((1, 3, 512), dtype=torch.bfloat16), fp8(1, 128, 512), torch.ones(1)
    assert runtime_hooks.aiter_fp8_kernel(upstream, x, w, one, bias=torch.ones(128)) is MARKER
    assert runtime_hooks.aiter_fp8_kernel(upstream, x, w, one, dtype=torch.float16) is MARKER
    assert runtime_hooks.aiter_fp8_kernel(never, x, w, one).shape == (1, 3, 128)


@pytest.mark.parametrize(
    ("first", "second"), [("auto", "upstream"), ("upstream", "auto"), ("auto", "triton"), ("torch", "auto")]
)
def test_a_process_has_one_runtime(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing is hooked, so one is pretended and sglang is said to have nothing to hook."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime_hooks, "runtime_hooks", lambda *_, **__: ())
    monkeypatch.setattr(runtime_hooks, "_runtime", None)
    monkeypatch.setattr(runtime_hooks, "_backend", Backend.AUTO)
    for _ in range(2):
        assert runtime_hooks.register_runtime_hooks(first) == ()
    before = runtime_hooks._backend
    with pytest.raises(EngineError, match=f"runtime '{second}'.*loaded with runtime '{first}'"):
        runtime_hooks.register_runtime_hooks(second)
    assert runtime_hooks._backend is before
