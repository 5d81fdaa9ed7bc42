"""The conversion of `weightprep convert`, kv_b_proj from bf16 to fp8 under one scale, as other tools do it.

    python scripts/convert_peers.py naive|compressed-tensors|llm-compressor SOURCE DESTINATION

For scripts/bench_convert.py, which times each in a process of its own. Each runs under an interpreter that has the
tool; compressed-tensors takes its conversions as Python classes, so the class is here.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

TARGET = "re:.*kv_b_proj$"


def naive(source: Path, destination: Path) -> None:
    """The loop that everyone writes: load a shard, change it, save it."""
    from safetensors.torch import load_file, save_file

    destination.mkdir()
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            save_file(quantized(load_file(path)), destination / path.name, metadata={"format": "pt"})
        else:
            shutil.copy(path, destination)


def compressed_tensors(source: Path, destination: Path) -> None:
    """Its entry point for checkpoints that are too large to load."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.quantization import QuantizationConfig

    class Fp8:
        """A `Converter` of compressed-tensors."""

        def process(self, tensors: dict[str, Any]) -> dict[str, Any]:
            return quantized(tensors)

        def validate(self, tensors: dict[str, Any]) -> None:
            """Nothing to refuse."""

        def get_dependencies(self, name: str) -> set[str]:
            return set()

        def create_config(self) -> QuantizationConfig:
            return QuantizationConfig(config_groups={"kv_b": scheme()})

    convert_checkpoint(source, destination, Fp8())


def llm_compressor(source: Path, destination: Path) -> None:
    """Its data-free quantization, which works file by file as well."""
    from llmcompressor.entrypoints.model_free import model_free_ptq

    model_free_ptq(source, destination, scheme=scheme(), device="cpu")


def scheme() -> Any:
    """One scale for each kv_b_proj, in the words of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, observer="memoryless_minmax")
    return QuantizationScheme(targets=[TARGET], weights=weights)


def quantized(tensors: dict[str, Any]) -> dict[str, Any]:
    """`tensors` with every kv_b_proj in fp8, its scale beside it."""
    import torch

    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().max() / 448
        tensors[name] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale")] = scale
    return tensors


TOOLS = {"naive": naive, "compressed-tensors": compressed_tensors, "llm-compressor": llm_compressor}

if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    TOOLS[kind](*map(Path, paths))
