"""Every recipe and every encoding that people serve, through the real loaders of sglang, against NumPy.

sglang's own models are built and filled on the CPU. What a CPU lacks is named here and nowhere hidden: Quark's schemes
ask the device for its capability before they build their tensors (answered for them), and what follows
post_load_weights is left out, because fp8 linears ask for AMX there. Neither touches kv_b_proj or what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import absorbed_oracle as oracle
import pytest
import recipe_loads
import torch
from ranks import Ranks
from recipe_loads import Loaded
from safetensors.torch import load_file, save_file

from weightprep.synth import synthesize

LAYERS = 2
HEAD_DIMS = {"glm": (192, 256), "deepseek": (128, 128), "kimi": (128, 128), "glm5": (256, 256)}


@dataclass(frozen=True)
class Case:
    """A published kind of checkpoint.

    :param drafts: whether it has a NextN layer that sglang can load here
    """

    arch: str
    encoding: str
    recipe: str
    what: str
    drafts: bool = True
    layers: int = LAYERS
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.arch}-{self.encoding}"

    @property
    def dims(self) -> tuple[int, int]:
        return next(dims for name, dims in HEAD_DIMS.items() if self.arch.startswith(name))

    def module(self, layer: int) -> str:
        prefix = {"kimi_k25": "language_model.model."}.get(self.arch, "model.")
        return f"{prefix}layers.{layer}.self_attn.kv_b_proj"


CASES = [
    Case("glm_moe_dsa", "bf16", "glm_moe_dsa", "GLM-5, 5.1, 5.2"),
    Case("glm_moe_dsa", "fp8_block", "glm_moe_dsa", "GLM-5-FP8 to 5.2-FP8, and GLM-5.3's native checkpoint"),
    Case("glm_moe_dsa", "mxfp4_experts", "glm_moe_dsa", "amd/GLM-5.x-MXFP4"),
    Case("glm_moe_dsa", "mxfp4_attn_fp8", "glm_moe_dsa", "amd/GLM-5.2-Quark-MXFP4-AttnFP8"),
    Case("glm_moe_dsa", "fp8_block_quark", "glm_moe_dsa", "block fp8 that Quark's file-to-file export left"),
    Case("deepseek_v2", "bf16", "deepseek_v3", "DeepSeek-V2, with q_lora", drafts=False),
    Case("deepseek_v2_lite", "bf16", "deepseek_v3", "DeepSeek-V2-Lite, without", drafts=False),
    Case("deepseek_v3", "bf16", "deepseek_v3", "DeepSeek-V3 and R1 in bf16"),
    Case("deepseek_v3", "fp16", "deepseek_v3", "the same in fp16"),
    Case("deepseek_v3", "fp32", "deepseek_v3", "the same in fp32"),
    Case("deepseek_v3", "fp8_block", "deepseek_v3", "DeepSeek-V3 and R1 as published"),
    Case("deepseek_v3", "fp8_block_ue8m0", "deepseek_v3", "DeepSeek-V3.1"),
    Case("deepseek_v3", "fp8_block_e8m0", "deepseek_v3", "scales of type e8m0"),
    Case("deepseek_v32", "fp8_block", "deepseek_v3", "DeepSeek-V3.2"),
    Case("deepseek_v3", "fp8_channel", "deepseek_v3", "attention and experts in per-channel fp8 by Quark"),
    Case("deepseek_v3", "fp8_tensor", "deepseek_v3", "one scale, kept"),
    # DeepSeek's draft model finds Quark's schemes of layer 61 only, the published one
    Case("deepseek_v3", "mxfp4", "deepseek_v3", "amd/DeepSeek-R1-MXFP4", drafts=False),
    Case("deepseek_v3", "mxfp4_experts", "deepseek_v3", "amd/DeepSeek-R1-0528-MXFP4-ASQ", drafts=False),
    Case("deepseek_v3", "int8_channel", "deepseek_v3", "w8a8_int8"),
    Case("deepseek_v3", "int8_block", "deepseek_v3", "blockwise_int8"),
    Case("kimi_k2", "fp8_block", "kimi_k2", "Kimi-K2", drafts=False),
    Case("kimi_k2", "bf16", "kimi_k2", "Kimi-K2 in bf16", drafts=False),
    Case("kimi_k25", "int4_experts", "kimi_k2", "Kimi-K2.5 and K2.6", drafts=False),
    Case("kimi_k25", "mxfp4_experts", "kimi_k2", "amd/Kimi-K2.5-MXFP4 and K2.6-MXFP4", drafts=False),
    Case("kimi_k25", "bf16", "kimi_k2", "Kimi-K2.5 in bf16", drafts=False),
    Case("glm4_moe_lite", "bf16", "glm4_moe_lite", "GLM-4.7-Flash"),
    Case("glm4_moe_lite", "fp8_block", "glm4_moe_lite", "GLM-4.7-Flash in block fp8"),
]
BY_ID = {case.id: case for case in CASES}
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)

Source = Callable[[Case], Path]
Load = Callable[..., Loaded]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The small checkpoint of a case, written once."""
    root = tmp_path_factory.mktemp("sources")

    def write(case: Case) -> Path:
        path = root / f"{case.id}-{case.layers}"
        if not path.exists():
            small = {"n_routed_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
            synthesize(
                path,
                arch=case.arch,
                encoding=case.encoding,
                layers=case.layers,
                shards=2,
                overrides=small | case.overrides,
            )
            if "e8m0" in case.encoding:
                spread_scales(path)
        return path

    return write


def spread_scales(root: Path) -> None:
    """Random weights of one size have one power of two as every scale, which counts as one scale: multiply some by 4."""
    for path in root.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "kv_b_proj.weight_scale" in name:
                tensor[0] = (tensor[0].float() * 4).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def load(tp1: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("reports")

    def run(path: Path, *, load_format: str = "weightprep", draft: bool = False, **extra: Any) -> Loaded:
        return tp1.run(recipe_loads.load, path, load_format, extra, folder, draft)[0]  # type: ignore[no-any-return]

    return run


def models_of(case: Case) -> list[tuple[bool, list[int]]]:
    """Whether it is the draft, and the layers of the checkpoint that it holds."""
    return [(False, list(range(case.layers))), *([(True, [case.layers])] if case.drafts else [])]


def check_report(loaded: Loaded, layers: list[int], recipe: str, path: str, *, fast: bool = True) -> None:
    assert loaded.report["recipe"] == recipe
    assert [(layer["layer"], layer["path"], layer["fast"]) for layer in loaded.report["layers"]] == [
        (layer, path, fast) for layer in layers
    ]


@EACH
def test_fp8_in_the_form_that_the_kernels_gate_on(case: Case, source: Source, load: Load) -> None:
    root = source(case)
    nope, v = case.dims
    for draft, layers in models_of(case):
        loaded = load(root, draft=draft, target="gfx950")
        assert sorted(loaded.layers) == layers
        check_report(loaded, layers, case.recipe, "fp8_absorbed")
        for layer, tensors in loaded.layers.items():
            wanted = oracle.fp8_absorbed(root, case.module(layer), nope, v)
            oracle.same_bytes(tensors, wanted, f"{case.id} layer {layer}")
            assert (tensors["w_kc"].dtype, tensors["w_vc"].dtype) == (torch.float8_e4m3fn,) * 2
            rank = tensors["w_kc"].shape[2]
            assert loaded.strides[layer] == {"w_kc": (nope * rank, 1, nope), "w_vc": (rank * v, 1, rank), "w_scale": ()}


@pytest.mark.parametrize("name", ["glm_moe_dsa-bf16", "deepseek_v3-fp8_block", "kimi_k25-int4_experts"])
def test_e4m3fnuz_for_gfx942(name: str, source: Source, load: Load) -> None:
    case = BY_ID[name]
    nope, v = case.dims
    loaded = load(source(case), target="gfx942")
    # graphs take the fp8 kernel for q; for v sglang has none there
    check_report(loaded, list(range(case.layers)), case.recipe, "fp8_absorbed+fp8_dequantized", fast=False)
    for layer, tensors in loaded.layers.items():
        wanted = oracle.fp8_absorbed(source(case), case.module(layer), nope, v, fnuz=True)
        oracle.same_bytes(tensors, wanted, f"{name} layer {layer}")
        assert tensors["w_kc"].dtype is torch.float8_e4m3fnuz
