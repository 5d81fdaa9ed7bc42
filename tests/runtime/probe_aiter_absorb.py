"""Run in a process of its own: the backend `aiter` with the wheel's kernels, and aiter's MXFP4 kernel on a GPU.

The MXFP4 kernel needs tl.dot_scaled, which Triton's interpreter lacks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from absorb_oracle import Weight, product, to_float64
from aiter_wheel import WithoutAmdKeys, import_triton_module
from interpreter import install_exact_casts

from weightprep.runtime.absorb import absorb_into, absorb_q, absorb_v
from weightprep.runtime.choice import ActQuant, Backend

FP8 = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
MXFP4 = "batched_gemm_afp4wfp4_pre_quant"
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2}


def distance(a: torch.Tensor, b: torch.Tensor | np.ndarray) -> float:
    x, y = to_float64(a), b if isinstance(b, np.ndarray) else to_float64(b)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def probe_fp8(folder: Path, device: str) -> dict[str, dict[str, float]]:
    """Distances of the backend's results from the reference with the same activations, and from float64."""
    module = import_triton_module(folder, FP8)
    setattr(module, f"_{FP8}_kernel", WithoutAmdKeys(getattr(module, f"_{FP8}_kernel")))
    module._get_config = lambda m, n, k: {**CONFIG, "kpack": 1, "waves_per_eu": 2, "cache_modifier": ".cg"}
    report = {}
    for k, n, m in ((512, 256, 3), (512, 128, 17), (192, 512, 5), (128, 512, 17)):
        weight = Weight.make("e4m3fn", 2, k, n, device)
        wide = torch.full((2, m, k + 64), float("nan"), device=device, dtype=torch.bfloat16)
        x = wide.transpose(0, 1)[:, :, 64:]
        x.copy_(torch.randn((m, 2, k), generator=torch.Generator().manual_seed(k)))
        buffer = torch.full((m, 2, n), float("nan"), device=device, dtype=torch.bfloat16)
        absorb_into(buffer, x, weight.w, weight.scale, backend=Backend.AITER)
        results = {
            "absorb_v": absorb_v(x, weight.w, weight.scale, backend=Backend.AITER),
            "absorb_q": absorb_q(x, weight.w, weight.scale, backend=Backend.AITER).transpose(0, 1),
            "absorb_into": buffer,
        }
        ours = absorb_v(x, weight.w, weight.scale, backend=Backend.TORCH, act_quant=ActQuant.GROUP)
        for name, result in results.items():
            assert isinstance(result, torch.Tensor)
            assert isinstance(ours, torch.Tensor)
            report[f"{name} K={k} N={n} M={m}"] = {
                "to reference": distance(result, ours),
                "to float64": distance(result, product(x, weight)),
            }
    return report


def probe_mxfp4(folder: Path) -> dict[str, object]:
    """aiter's MXFP4 kernel writing through the strided view of a batch-major buffer, and into a head-major one."""
    module = import_triton_module(folder, MXFP4)
    module.arch_info.is_fp4_avail = lambda: True
    heads, k, n = 8, 512, 256
    report: dict[str, object] = {}
    for m in (1, 16, 64):
        weight = Weight.make("mxfp4", heads, k, n, "cuda")
        assert weight.mx_scale is not None
        x = torch.randn((m, heads, k), device="cuda").bfloat16()
        operands = (x.transpose(0, 1), weight.w.transpose(1, 2), weight.mx_scale.transpose(1, 2), torch.bfloat16)
        batch_major = torch.full((m, heads, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        head_major = torch.full((heads, m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        for y in (batch_major.transpose(0, 1), head_major):
            config = {**CONFIG, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": 1, "cache_modifier": ".cg"}
            module.batched_gemm_afp4wfp4_pre_quant(*operands, y, config)
        flat = batch_major.flatten(1, 2)
        report[f"M={m}"] = {
            "view equals head-major": torch.equal(batch_major, head_major.transpose(0, 1)),
            "flatten is a view": flat.data_ptr() == batch_major.data_ptr(),
            "to float64": distance(batch_major, product(x, weight)),
            "ours to float64": distance(absorb_v(x, weight.w, mx_scale=weight.mx_scale), product(x, weight)),
        }
    return report


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        install_exact_casts()
    source = Path(sys.argv[1])
    print(json.dumps({"fp8": probe_fp8(source, "cuda" if on_gpu else "cpu")}), flush=True)
    if on_gpu:
        print(json.dumps({"mxfp4": probe_mxfp4(source)}), flush=True)
