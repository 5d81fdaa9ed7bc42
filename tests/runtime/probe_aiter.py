"""Run in a process of its own by test_scale_probe: probe the wheel's producers and compare their results with ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from aiter_wheel import import_triton_module
from interpreter import install_exact_casts

from weightprep.runtime.rms_quant import rms_norm_quantize
from weightprep.runtime.scale_layout import GroupScaleLayout
from weightprep.runtime.scale_probe import group_arguments, probe_producer, rms_arguments

if __name__ == "__main__":
    if not torch.cuda.is_available():
        install_exact_casts()
    aiter = import_triton_module(Path(sys.argv[1]), "fused_fp8_quant")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fp8 = torch.float8_e4m3fn
    rms = probe_producer(aiter.fused_rms_fp8_group_quant, rms_arguments(group_size=128, dtype_quant=fp8), device=device)
    arguments = group_arguments(group_size=128, dtype_quant=fp8)
    flatten = probe_producer(
        aiter.fused_flatten_fp8_group_quant, lambda x: ((x[:, None],), arguments(x)[1]), device=device
    )

    x = torch.randn(5, 768, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).to(device)
    weight = torch.ones(768, dtype=torch.bfloat16, device=device)
    report: dict[str, object] = {"rms": rms.behaviour.name, "flatten": flatten.behaviour.name}
    for layout in GroupScaleLayout:
        (theirs, scale), *_ = rms(x, weight, 1e-6, group_size=128, dtype_quant=fp8, layout=layout)
        ours = rms_norm_quantize(x, weight, 1e-6, layout=layout)
        report[layout.value] = {
            "holds": layout.holds(scale),
            "scale_difference": ((scale - ours.scale).abs() / ours.scale).max().item(),
            "bytes_differ": (theirs.view(torch.uint8) != ours.q.view(torch.uint8)).float().mean().item(),
            "codes_apart": (theirs.view(torch.int8).int() - ours.q.view(torch.int8).int()).abs().max().item(),
        }
    print(json.dumps(report))
