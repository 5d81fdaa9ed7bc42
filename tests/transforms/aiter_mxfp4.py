"""Run in a process of its own: aiter's dynamic_mxfp4_quant in Triton's interpreter, from a file to a file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

import aiter_wheel
import interpreter


def main(folder: str, values: str, results: str) -> None:
    interpreter.install_exact_casts()
    quant = aiter_wheel.import_triton_module(Path(folder), "quant")
    import triton.language as tl

    # in the interpreter the method lacks what the function has
    tl.core.tensor.floor = lambda self, _semantic=None: tl.floor(self)
    packed, scale = quant.dynamic_mxfp4_quant(torch.load(values, weights_only=True))
    torch.save((packed.view(torch.uint8), scale.view(torch.uint8)), results)


if __name__ == "__main__":
    main(*sys.argv[1:])
