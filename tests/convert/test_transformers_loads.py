"""Checkpoints converted inline load in transformers on a CPU: the numbers that they store, and nothing else changed.

transformers reads block fp8 (through accelerate, expanded to bf16 where there is no GPU) and compressed-tensors. It
reads Quark's checkpoints only with AMD's package, and does not know the model type kimi_k2: for those, sglang's own
loaders are run in tests/engines/sglang/test_recipe_loads.py, and the fields that they read are compared in
test_quant_config.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines" / "sglang"))

from absorbed_oracle import kv_b_numbers

from weightprep.cli import app
from weightprep.synth import synthesize

SMALL = {
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "moe_intermediate_size": 128,
}


def load(root: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Parameters by name, and what transformers missed or did not expect."""
    import transformers

    kind = transformers.AutoModelForImageTextToText if "kimi" in root.parent.name else transformers.AutoModelForCausalLM
    model, found = kind.from_pretrained(root, dtype=torch.bfloat16, output_loading_info=True)
    return model.state_dict(), {key: sorted(found[key]) for key in ("missing_keys", "unexpected_keys")}


def convert(tmp_path: Path, arch: str, encoding: str) -> tuple[Path, Path]:
    folder = tmp_path / arch
    folder.mkdir()
    source = synthesize(folder / "src", arch=arch, encoding=encoding, layers=2, overrides=SMALL)
    result = CliRunner().invoke(app, ["convert", str(source), str(folder / "dst")])
    assert result.exit_code == 0, result.output
    return source, folder / "dst"


@pytest.mark.parametrize(
    "arch", ["glm_moe_dsa", "glm4_moe_lite", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32"]
)
def test_block_fp8(tmp_path: Path, arch: str) -> None:
    pytest.importorskip(
        "accelerate", reason="transformers refuses fp8 checkpoints without accelerate: not loaded there"
    )
    source, converted = convert(tmp_path, arch, "bf16")
    before, told_before = load(source)
    after, told_after = load(converted)
    assert told_after["missing_keys"] == told_before["missing_keys"] == []
    # NextN layers, which transformers never builds; the converted one has a scale more
    assert {name for name in told_after["unexpected_keys"] if not name.endswith("weight_scale_inv")} == set(
        told_before["unexpected_keys"]
    )
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        if name.endswith("kv_b_proj.weight"):
            wanted = kv_b_numbers(converted, name.removesuffix(".weight"))
            # one rounding of the scale to bf16 at most, and one of the product: 2^-9 of the value each
            assert np.all(np.abs(tensor.float().numpy() - wanted) <= 2.0**-8 * np.abs(wanted)), name
            assert not torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, before[name]), name


def test_a_wrapper_in_compressed_tensors(tmp_path: Path) -> None:
    """Kimi K2.5: what transformers builds packed, and misses of the vision tower, is the same after conversion."""
    source, converted = convert(tmp_path, "kimi_k25", "int4_experts")
    (before, told_before), (after, told_after) = load(source), load(converted)
    assert told_after == told_before
    prefix = "model.language_model.layers"
    for layer in range(2):
        module = f"{prefix}.{layer}.self_attn.kv_b_proj"
        wanted = kv_b_numbers(converted, f"language_model.model.layers.{layer}.self_attn.kv_b_proj")
        values = after[f"{module}.weight"].float() * after[f"{module}.weight_scale"].float()
        np.testing.assert_array_equal(values.numpy(), wanted)
        o_proj = f"{prefix}.{layer}.self_attn.o_proj.weight"
        assert torch.equal(after[o_proj], before[o_proj])
