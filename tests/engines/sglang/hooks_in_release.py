"""Run as a script with one release of sglang first on the path: weightprep's hooks on that release's own modules.

Prints one JSON object per case. In a process of its own, because it installs a stand-in `aiter` and triton driver.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "runtime"))

import torch
from aiter_wheel import import_triton_module, unpacked
from interpreter import install_exact_casts
from releases import prepare_import


def main() -> None:
    folder = unpacked()
    if folder is None:
        raise SystemExit(77)
    install_exact_casts()
    quant = import_triton_module(folder, "fused_fp8_quant")
    prepare_import()
    import sglang

    print(json.dumps({"part": "from", "place": str(sglang.__path__[0])}), flush=True)
    import absorb_against_upstream
    import compressor_in_release

    parts = {"compressor": compressor_in_release.cases, "absorb": lambda: absorb_against_upstream.cases(quant)}
    if hasattr(
        __import__("sglang.srt.layers.quantization.fp8_utils", fromlist=["x"]), "materialize_bpreshuffle_fp8_scale"
    ):
        import scales_against_upstream

        # before "scales", which hooks what quantizes
        parts["absorbed_scales"] = lambda: scales_against_upstream.absorbed(quant)
        parts["scales"] = lambda: scales_against_upstream.cases(quant)
    for name, cases in parts.items():
        for case in cases():
            print(json.dumps({"part": name} | case), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        main()
