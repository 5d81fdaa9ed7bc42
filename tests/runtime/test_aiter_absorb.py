"""The backend `aiter`, executed with the kernels of the released wheel in Triton's interpreter (or on a GPU)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aiter_wheel import WHEEL, unpacked

from weightprep.errors import EngineError
from weightprep.runtime.absorb import absorb_v
from weightprep.runtime.choice import Backend


def test_aiters_fp8_kernel_computes_the_product_in_every_layout() -> None:
    folder = unpacked()
    if folder is None:
        pytest.skip(f"{WHEEL} could not be fetched: the backend 'aiter' is not executed")
    script = [sys.executable, str(Path(__file__).with_name("probe_aiter_absorb.py")), str(folder)]
    run = subprocess.run(script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout.splitlines()[0])["fp8"]
    assert len(report) == 12
    for name, distances in report.items():
        # aiter multiplies by 1/448 where the reference divides. Of bf16 activations many then lie on a tie of e4m3, and
        # those take either neighbour, 2^-3 of the value apart: with one in a hundred, 2^-3 * 0.01^0.5 in the norm.
        assert distances["to reference"] < 2.0**-6, name
        # Rounding activations to e4m3 costs at most half an ulp of 2^-3, 2^-4 of each, and less in the norm.
        assert distances["to float64"] < 2.0**-4, name


def test_without_aiter_the_backend_says_so() -> None:
    x = torch.zeros((1, 1, 128), dtype=torch.bfloat16)
    w = torch.zeros((1, 128, 128), dtype=torch.float8_e4m3fn)
    with pytest.raises(EngineError, match="backend 'aiter'"):
        absorb_v(x, w, torch.ones(1), backend=Backend.AITER)
