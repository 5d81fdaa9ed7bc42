"""The replacements of sglang's absorbed products against sglang's own functions and the form upstream expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightprep.engines.sglang import runtime_hooks
from weightprep.engines.sglang.versions import installed_root
from weightprep.runtime import witness
from weightprep.runtime.scale_layout import GroupScaleLayout

# Upstream rounds activations to e4m3 in groups, we keep them in bf16. Rounding to 3 bits of mantissa is off by at most
# 2^-4 and, over uniformly spread mantissas, by 0.026 rms of the value; products with independent weights keep that
# ratio. A quantized result adds the same once more on each side: sqrt(0.026^2 + 2 * 0.026^2) = 0.045.
ACTIVATION_ROUNDING = 0.03
WITH_QUANTIZED_RESULT = 0.05


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    script = Path(__file__).with_name("absorb_against_upstream.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 77:
        pytest.skip("the amd-aiter wheel cannot be fetched: sglang's ROCm functions were not compared with ours")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_same_results_in_the_same_form(cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 18
    for case in cases:
        assert case["same_form"], case
        quantized = case["o_proj"] == "fp8_block"
        assert case["difference"] < (WITH_QUANTIZED_RESULT if quantized else ACTIVATION_ROUNDING), case
        assert case["error_ours"] <= case["error_theirs"] * 1.0001, case
        assert case.get("flatten_is_a_view", True), case


def test_every_call_is_counted_or_declined_with_a_reason(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        if case["weights"] == "kernel":
            continue
        bf16_weights = case["weights"] == "torch.bfloat16"
        corrected = case["lora"] and case["o_proj"] == "fp8_block"
        assert bool(case["taken"]) != bool(case["declined"]), case
        assert bool(case["declined"]) == (bf16_weights or corrected), case
        # what we decline is upstream's own result, bit for bit
        if case["declined"]:
            assert case["difference"] == 0.0, case


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
