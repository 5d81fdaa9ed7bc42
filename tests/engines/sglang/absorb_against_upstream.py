"""One release's own absorbed products on the CPU, on aiter's own kernels or a stand-in for CUDA's, beside the same with
weightprep's hooks applied through sglang's registry.

From 0.5.18 on the ROCm products are functions and are called; before, and on CUDA, they are written into the forward
methods, which are run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from absorb_oracle import mxfp4_groups
from forward_in_release import (
    BF16,
    FP8,
    HEADS,
    METHODS,
    NOPE,
    RANK,
    ROWS,
    Copies,
    V,
    bmm_fp8,
    forward_mla,
    query_product,
    value_product,
)

UINT8 = torch.uint8
FP8_KERNEL = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
MXFP4_KERNEL = "batched_gemm_afp4wfp4_pre_quant"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def aiter_kernels(quant: Any) -> dict[str, Callable[..., Any]]:
    """The wheel's kernels under the names that sglang binds, on a Triton in the interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    # The kernel states `stride_biasb > 0` also where there is no bias; a compiled kernel ignores it.
    interpreter.InterpreterBuilder.create_assume = lambda self, condition: None
    # In the interpreter the method lacks what the function has.
    tl.core.tensor.floor = lambda self, _semantic=None: tl.floor(self)
    fp8 = importlib.import_module(f"aiter.ops.triton.{FP8_KERNEL}")
    mxfp4 = importlib.import_module(f"aiter.ops.triton.{MXFP4_KERNEL}")
    flatten = importlib.import_module("aiter.ops.triton.fused_mxfp4_quant")
    # Without a configuration the wheel splits K with a function that it does not import.
    blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 1}

    def mxfp4_kernel(
        x: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype, y: torch.Tensor
    ) -> Any:
        config = blocks | {"cache_modifier": ""}
        return getattr(mxfp4, MXFP4_KERNEL)(x, w, w_scales, dtype, y, config=config)

    return {
        FP8_KERNEL: getattr(fp8, FP8_KERNEL),
        MXFP4_KERNEL: mxfp4_kernel,
        "fused_flatten_mxfp4_quant": flatten.fused_flatten_mxfp4_quant,
        # The released wheel has no transpose_scale; row-major is what upstream asks for without bpreshuffle.
        "fused_flatten_fp8_group_quant": lambda x, group_size, dtype_quant, transpose_scale=False: (
            quant.fused_flatten_fp8_group_quant(x, group_size, dtype_quant)
        ),
    }


def o_proj(kind: str) -> SimpleNamespace:
    """What sglang looks at to see how this o_proj wants its input."""
    if kind == "mxfp4":
        return SimpleNamespace(weight=torch.zeros(1, dtype=UINT8))
    if kind == "bf16":
        return SimpleNamespace(weight=torch.zeros(1, dtype=BF16))
    scale = torch.ones((2, 8) if kind == "fp8_block" else (2, 1))
    return SimpleNamespace(weight=torch.zeros(1, dtype=FP8), weight_scale=scale)


def attention(weights: str, projection: str = "bf16", lora: bool = False) -> tuple[SimpleNamespace, dict[str, Any]]:
    """An attention module, and its exact weights in float64 as w_kc (H, nope, rank) and w_vc (H, rank, v)."""
    generator = torch.Generator().manual_seed(7)
    made: dict[str, Any] = {"w_scale": 1.0, "w_scale_k": None, "w_scale_v": None}
    exact = {}
    wide = {
        "w_kc": torch.randn((HEADS, RANK, NOPE), generator=generator) * 0.05,
        "w_vc": torch.randn((HEADS, V, RANK), generator=generator) * 0.05,
    }
    if weights == "fp8":
        made["w_scale"] = (max(w.abs().max() for w in wide.values()) / 448.0).reshape(())
    for name, w in wide.items():
        if weights == "mxfp4":
            packed = torch.randint(0, 256, (*w.shape[:2], w.shape[2] // 2), generator=generator, dtype=UINT8)
            powers = torch.randint(118, 123, (*w.shape[:2], w.shape[2] // 32), generator=generator, dtype=UINT8)
            made[name], made[f"w_scale_{name[2]}"] = packed.transpose(1, 2), powers.transpose(1, 2)
            exact[name] = from_mxfp4(packed, powers).transpose(1, 2)
        else:
            scale = made["w_scale"]
            stored = (w / scale).to(FP8 if weights == "fp8" else BF16)
            made[name], exact[name] = stored.transpose(1, 2), (stored.double() * float(scale)).transpose(1, 2)
    module = SimpleNamespace(
        **made, num_local_heads=HEADS, o_proj=o_proj(projection), kv_b_proj=SimpleNamespace(set_lora=lora)
    )
    module.kv_b_proj.lora_backend = SimpleNamespace(name="triton")
    return module, exact


def from_mxfp4(packed: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """float64 of values packed along the last dimension, low nibble first."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return E2M1[codes.long()] * torch.exp2(powers.double() - 127).repeat_interleave(32, dim=-1)


def rounded_to_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """x (M, H, K) as aiter's kernel rounds activations, by the NumPy oracle."""
    packed, powers = mxfp4_groups(x.float().flatten(1).numpy())
    return from_mxfp4(torch.from_numpy(np.asarray(packed)), torch.from_numpy(np.asarray(powers))).view(x.shape)


def widen(result: Any) -> torch.Tensor:
    """What o_proj is given, in float64 (M, H * v)."""
    if not isinstance(result, tuple):
        return result.double()
    values, scales = result
    if values.dtype == UINT8:
        return from_mxfp4(values, scales)
    return values.double() * scales.double().repeat_interleave(128, dim=1)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def form(result: Any) -> list[tuple[Any, ...]]:
    tensors = result if isinstance(result, tuple) else (result,)
    # with one row, or one group, the other stride says nothing
    return [(tuple(t.shape), str(t.dtype), t.stride()) for t in tensors]


def compare(
    name: dict[str, Any], theirs: Any, ours: Any, wanted: torch.Tensor, copies: list[int], quantized: Any = None
) -> dict[str, Any]:
    from weightprep.runtime import witness

    found = {
        **name,
        "same_form": form(theirs) == form(ours),
        "difference": relative(widen(ours), widen(theirs)),
        "error_ours": relative(widen(ours), wanted),
        "error_theirs": relative(widen(theirs), wanted),
        "copies": copies,
        "taken": witness.counts(),
        "declined": [list(key) for key in witness.declined()],
    }
    if quantized is not None:
        # upstream against the exact product of activations rounded as its kernel does
        found["theirs_explained"] = relative(widen(theirs), quantized)
    return found


def cases(quant: Any) -> Iterator[dict[str, Any]]:
    """:param quant: aiter.ops.triton.fused_fp8_quant of the wheel"""
    from weightprep.engines.sglang import runtime_hooks
    from weightprep.engines.sglang.guard import ensure_hook
    from weightprep.engines.sglang.versions import installed_root
    from weightprep.runtime import witness
    from weightprep.runtime.choice import Backend

    runtime_hooks._backend = Backend.TORCH
    shared = forward_mla()
    try:
        rocm = importlib.import_module(f"{METHODS}.forward_mla_rocm")
    except ModuleNotFoundError:
        rocm = None
    kernels = aiter_kernels(quant)
    for module in (shared, rocm):
        for name, kernel in kernels.items() if module is not None else ():
            setattr(module, name, kernel)
    shared.bmm_fp8 = bmm_fp8
    if rocm is not None:
        rocm._use_aiter_gfx95, rocm._absorb_bmm_num_cu = True, 256
        utils = importlib.import_module("sglang.srt.models.deepseek_common.utils")
        utils._use_aiter_bpreshuffle_gfx95 = rocm._use_aiter_bpreshuffle_gfx95 = False
    x_v = torch.randn((ROWS, HEADS, RANK), generator=torch.Generator().manual_seed(1)).to(BF16)
    x_q = torch.randn((ROWS, HEADS, NOPE), generator=torch.Generator().manual_seed(2)).to(BF16)

    def run() -> dict[tuple[Any, ...], tuple[Any, int, Any, Any]]:
        results = {}
        for key in _keys(rocm is not None):
            where, product, weights, projection, lora = key
            attn, _ = attention(weights, projection, lora)
            x = x_q if product == "q" else x_v
            width = (RANK if product == "q" else V) * HEADS * ROWS
            witness.reset()
            with Copies(width, BF16) as copies:
                if where == "function":
                    options = {"is_capture_mode": False} if product == "q" else {}
                    result = getattr(rocm, f"rocm_absorb_{product}_bmm")(attn, x, **options)
                else:
                    method = query_product if product == "q" else value_product
                    result = method(shared, attn, x, hip=where == "rocm")
            results[key] = result, copies.count, witness.counts(), [list(k) for k in witness.declined()]
        return results

    theirs = run()
    root = installed_root()
    assert root is not None
    hooked = {}
    for hip in (False, True):
        for hook in runtime_hooks.runtime_hooks(root, hip=hip):
            if getattr(importlib.import_module(hook.target.rsplit(".", 1)[0]), hook.target.rsplit(".", 1)[1], None):
                ensure_hook(hook.target, hook.around)
                hooked[hook.target.rsplit(".", 1)[1]] = hip
    for key, (result, copied, taken, declined) in run().items():
        where, product, weights, projection, lora = key
        _, exact = attention(weights)
        x, w = (x_q, exact["w_kc"]) if product == "q" else (x_v, exact["w_vc"])
        wanted = _exact(where, product, x, w, lora)
        before, copies_before = theirs[key][:2]
        case = {"where": where, "product": product, "weights": weights, "o_proj": projection, "lora": lora}
        rounds = weights == "mxfp4" and projection == "bf16" and not lora
        explained = _exact(where, product, rounded_to_mxfp4(x), w, lora) if rounds else None
        found = compare(case, before, result, wanted, [copies_before, copied], explained)
        yield found | {"taken": taken, "declined": declined, "hooked": sorted(hooked)}


def _keys(functions: bool) -> Iterator[tuple[str, str, str, str, bool]]:
    rocm = "function" if functions else "rocm"
    for weights in ("fp8", "mxfp4", "bf16"):
        yield rocm, "q", weights, "bf16", False
        for projection in ("bf16", "fp8_block", "fp8_channel", "mxfp4"):
            # releases without the functions take every fp8 o_proj for one in blocks
            if projection != "fp8_channel" or (functions and weights == "fp8"):
                yield rocm, "v", weights, projection, False
        # upstream's own correction cannot be put on a quantized result
        yield rocm, "v", weights, "bf16", True
    if functions:
        yield rocm, "v", "fp8", "fp8_block", True
        yield rocm, "v", "mxfp4", "mxfp4", True
    for product in ("q", "v"):
        for weights in ("fp8", "bf16"):
            for lora in (False, True):
                yield "cuda", product, weights, "bf16", lora


def _exact(where: str, product: str, x: torch.Tensor, w: torch.Tensor, lora: bool) -> torch.Tensor:
    out = torch.bmm(x.double().transpose(0, 1), w).transpose(0, 1)
    if lora and where != "function":
        width = V if product == "v" else NOPE
        out[..., :width] += x[..., :width].double() * 0.125
    if product == "v":
        return out.flatten(1)
    return out.transpose(0, 1) if where == "function" else out
