"""Run as a script: sglang's own rocm_absorb_* on aiter's own kernels, on the CPU, beside weightprep's replacements.

Prints one JSON object per case. In a process of its own, because it installs a stand-in `aiter` and triton driver.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "runtime"))

import torch
from aiter_wheel import import_fused_fp8_quant, unpacked
from interpreter import install_exact_casts
from triton.runtime import interpreter

HEADS, NOPE, RANK, V, ROWS = 4, 192, 512, 256, 3
BF16 = torch.bfloat16


def upstream() -> Any:
    """forward_mla_rocm as on gfx95, with aiter's kernels from the wheel."""
    folder = unpacked()
    if folder is None:
        raise SystemExit(77)
    install_exact_casts()
    quant = import_fused_fp8_quant(folder)
    # The kernel states `stride_biasb > 0` also where there is no bias; a compiled kernel ignores it.
    interpreter.InterpreterBuilder.create_assume = lambda self, condition: None
    import aiter.ops.triton.batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant as gemm

    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla_rocm as module

    name = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
    setattr(module, name, getattr(gemm, name))
    module._use_aiter_gfx95, module._absorb_bmm_num_cu = True, 256
    # The released wheel has no transpose_scale; row-major is what upstream asks for without bpreshuffle.
    module.fused_flatten_fp8_group_quant = lambda x, group_size, dtype_quant, transpose_scale: (
        quant.fused_flatten_fp8_group_quant(x, group_size, dtype_quant)
    )
    return module


def attention(w_dtype: torch.dtype, o_proj: Any, lora: bool) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(7)
    w_kc = torch.randn((HEADS, RANK, NOPE), generator=generator) * 0.05
    w_vc = torch.randn((HEADS, V, RANK), generator=generator) * 0.05
    scale: Any = 1.0
    if w_dtype != BF16:
        scale = (torch.maximum(w_kc.abs().max(), w_vc.abs().max()) / 448.0).reshape(())
        w_kc, w_vc = w_kc / scale, w_vc / scale
    return SimpleNamespace(
        w_kc=w_kc.to(w_dtype).transpose(1, 2),
        w_vc=w_vc.to(w_dtype).transpose(1, 2),
        w_scale=scale,
        num_local_heads=HEADS,
        o_proj=o_proj,
        kv_b_proj=SimpleNamespace(set_lora=lora),
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def exact(x: torch.Tensor, w: torch.Tensor, scale: Any) -> torch.Tensor:
    return torch.bmm(x.double().transpose(0, 1), w.double()) * float(scale)


def widen(result: Any) -> torch.Tensor:
    if isinstance(result, tuple):
        values, scales = result
        return values.double() * scales.double().repeat_interleave(128, dim=1)
    return result.double()


def cases(module: Any) -> Iterator[dict[str, Any]]:
    from weightprep.engines.sglang import runtime_hooks
    from weightprep.runtime import witness

    plain = SimpleNamespace(weight=torch.zeros(1, dtype=BF16))
    block = SimpleNamespace(
        weight=torch.zeros(1, dtype=torch.float8_e4m3fn), weight_scale=torch.ones((2, 8), dtype=torch.float32)
    )
    channel = SimpleNamespace(
        weight=torch.zeros(1, dtype=torch.float8_e4m3fn), weight_scale=torch.ones((2, 1), dtype=torch.float32)
    )
    x_v = torch.randn((ROWS, HEADS, RANK), generator=torch.Generator().manual_seed(1)).to(BF16)
    x_q = torch.randn((ROWS, HEADS, NOPE), generator=torch.Generator().manual_seed(2)).to(BF16)
    for weights in (torch.float8_e4m3fn, BF16):
        for kind, o_proj in (("bf16", plain), ("fp8_block", block), ("fp8_channel", channel)):
            for lora in (False, True):
                attn = attention(weights, o_proj, lora)
                witness.reset()
                theirs = module.rocm_absorb_v_bmm(attn, x_v)
                ours = runtime_hooks.rocm_absorb_v(module.rocm_absorb_v_bmm, attn, x_v)
                wanted = exact(x_v, attn.w_vc, attn.w_scale).transpose(0, 1).flatten(1)
                yield {
                    "product": "v",
                    "weights": str(weights),
                    "o_proj": kind,
                    "lora": lora,
                    "same_form": _form(theirs) == _form(ours),
                    "difference": relative(widen(ours), widen(theirs)),
                    "error_ours": relative(widen(ours), wanted),
                    "error_theirs": relative(widen(theirs), wanted),
                    "taken": witness.counts(),
                    "declined": [reason for _, reason in witness.declined()],
                }
        attn = attention(weights, plain, False)
        witness.reset()
        theirs = module.rocm_absorb_q_bmm(attn, x_q, is_capture_mode=False)
        ours = runtime_hooks.rocm_absorb_q(module.rocm_absorb_q_bmm, attn, x_q, is_capture_mode=False)
        wanted = exact(x_q, attn.w_kc, attn.w_scale)
        yield {
            "product": "q",
            "weights": str(weights),
            "o_proj": "bf16",
            "lora": False,
            "same_form": _form(theirs) == _form(ours),
            "difference": relative(ours, theirs),
            "error_ours": relative(ours, wanted),
            "error_theirs": relative(theirs, wanted),
            "taken": witness.counts(),
            "declined": [reason for _, reason in witness.declined()],
        }
    yield from _older_kernel(module, x_v, x_q)


def _older_kernel(module: Any, x_v: torch.Tensor, x_q: torch.Tensor) -> Iterator[dict[str, Any]]:
    """The calls that 0.5.12 (no buffer) and 0.5.18 (batch-major buffer) make of aiter's fp8 kernel."""
    from weightprep.engines.sglang import runtime_hooks

    kernel = module.batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant
    attn = attention(torch.float8_e4m3fn, None, False)
    for name, x, w in (("q", x_q, attn.w_kc), ("v", x_v, attn.w_vc)):
        for given in (False, True):
            results = []
            for call in (kernel, lambda **rest: runtime_hooks.aiter_fp8_kernel(kernel, **rest)):
                buffer = torch.full((ROWS, HEADS, w.shape[2]), float("nan"), dtype=BF16) if given else None
                results.append(
                    call(
                        X=x,
                        WQ=w.transpose(-1, -2),
                        w_scale=attn.w_scale,
                        group_size=128,
                        YQ=buffer,
                        transpose_bm=given,
                        transpose_bm_in=True,
                        dtype=BF16,
                    )
                )
            theirs, ours = (r.transpose(0, 1) if given else r for r in results)
            yield {
                "product": name,
                "weights": "kernel",
                "o_proj": "given" if given else "new",
                "lora": False,
                "same_form": theirs.shape == ours.shape and theirs.dtype == ours.dtype,
                "difference": relative(ours, theirs),
                "error_ours": relative(ours, exact(x, w, attn.w_scale)),
                "error_theirs": relative(theirs, exact(x, w, attn.w_scale)),
                "flatten_is_a_view": ours.transpose(0, 1).flatten(1, 2).data_ptr() == ours.data_ptr(),
                "taken": {},
                "declined": [],
            }


def _form(result: Any) -> list[tuple[Any, ...]]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


if __name__ == "__main__":
    for case in cases(upstream()):
        print(json.dumps(case), flush=True)
