"""From recipe and config to a plan: names, layers, precisions and contracts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from weightprep.errors import RecipeError
from weightprep.formats import Encoding
from weightprep.recipe import Recipe, load_recipe, refuse_unsound, resolve

GLM_52: dict[str, object] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "kv_lora_rank": 512,
    "head_dim": 64,
}
KIMI = {key: value for key, value in GLM_52.items() if key != "architectures"} | {
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def test_glm_names_every_layer_and_the_nextn_layer() -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52)
    assert plan.dims == {"heads": 64, "nope": 192, "v": 256, "rank": 512}
    assert [module.source for module in plan.modules] == [f"model.layers.{i}.self_attn.kv_b_proj" for i in range(79)]
    assert [module.group for module in plan.modules] == ["decoder"] * 78 + ["nextn"]
    assert [module.optional for module in plan.modules] == [False] * 78 + [True]
    first = plan.modules[0]
    assert [step.name for step in first.store] == ["dequantize", "quantize_fp8"]
    assert [step.name for step in first.load] == ["split_kv_b", "e4m3_for_target", "layout"]
    assert first.prepare == first.store + first.load
    assert (first.precision, first.contract, first.min_sqnr_db) == ("fp8", "fp8_absorbed", 28)
    assert plan.recipe_hash == load_recipe("glm_moe_dsa").hash


@pytest.mark.parametrize("encoding", Encoding)
def test_fp8_sources_are_passed_unless_asked(encoding: Encoding) -> None:
    module = resolve(load_recipe("glm_moe_dsa"), GLM_52).modules[0]
    passed = encoding.value.startswith("fp8")
    assert module.store_for(encoding) == (() if passed else module.store)
    assert module.store_for(encoding, requantize=True) == module.store


def test_a_wrapper_differs_in_prefix_and_place_of_its_dims() -> None:
    wrapped = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": KIMI, "num_hidden_layers": 27}
    plan = resolve(load_recipe("kimi_k2"), wrapped)
    assert len(plan.modules) == 61
    assert plan.modules[60].source == "language_model.model.layers.60.self_attn.kv_b_proj"
    plain = resolve(load_recipe("kimi_k2"), {**KIMI, "architectures": ["DeepseekV3ForCausalLM"]})
    assert plain.modules[60].source == "model.layers.60.self_attn.kv_b_proj"
    assert plain.dims == plan.dims


def test_a_wrapper_without_its_inner_config() -> None:
    with pytest.raises(RecipeError, match=r"config\.json: text_config"):
        resolve(load_recipe("kimi_k2"), {**KIMI, "architectures": ["KimiK25ForConditionalGeneration"]})


@pytest.mark.parametrize("absent", [None, "null"])
def test_a_config_without_nextn(absent: str | None) -> None:
    config = {key: value for key, value in GLM_52.items() if key != "num_nextn_predict_layers"}
    if absent == "null":
        config["num_nextn_predict_layers"] = None
    assert len(resolve(load_recipe("glm_moe_dsa"), config).modules) == 78


def test_nextn_can_be_kept() -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52, nextn="keep")
    assert len(plan.modules) == 78
    assert plan.kept == ("model.layers.78.self_attn.kv_b_proj",)


@pytest.mark.parametrize(
    ("name", "precision", "decoder", "nextn"),
    [
        ("glm_moe_dsa", None, "fp8", "fp8"),
        ("glm_moe_dsa", "bf16", "bf16", "bf16"),
        ("glm_moe_dsa", "mxfp4", "mxfp4", "fp8"),
        ("glm_moe_dsa", {"decoder": "mxfp4"}, "mxfp4", "fp8"),
        ("glm_moe_dsa", {"decoder": "mxfp4", "nextn": "mxfp4"}, "mxfp4", "mxfp4"),
        ("glm_moe_dsa", {"nextn": "bf16"}, "fp8", "bf16"),
        ("deepseek_v3_mxfp4", None, "mxfp4", "fp8"),
        ("deepseek_v3_mxfp4", {"nextn": "mxfp4"}, "mxfp4", "mxfp4"),
        ("deepseek_v3_mxfp4", "fp8", "fp8", "fp8"),
    ],
)
def test_precision_by_group(name: str, precision: str | dict[str, str] | None, decoder: str, nextn: str) -> None:
    recipe = load_recipe(name)
    plan = resolve(recipe, {**GLM_52, "architectures": [recipe.architectures[0]]}, precision=precision)
    assert {module.group: module.precision for module in plan.modules} == {"decoder": decoder, "nextn": nextn}
    assert {module.contract for module in plan.modules if module.group == "nextn"} == {f"{nextn}_absorbed"}


def test_w_vc_alone_in_fp8_by_group() -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52, precision={"decoder": "bf16+fp8", "nextn": "bf16"})
    assert {module.group: module.precision for module in plan.modules} == {"decoder": "bf16+fp8", "nextn": "bf16"}
    assert plan.modules[0].store == ()
    contract = plan.contract(plan.modules[0].contract)
    assert (contract["w_kc"].dtype, contract["w_vc"].dtype) == (torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("target", ["gfx950", "gfx942", "sm90", "sm100", "cpu"])
@pytest.mark.parametrize("version", ["0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.22", "0.5.23"])
@pytest.mark.parametrize(
    ("precision", "readers"),
    [
        ("fp8", {"gfx950", "gfx942", "sm90", "sm100", "cpu"}),
        ("bf16", {"gfx950", "gfx942", "sm90", "sm100", "cpu"}),
        ("mxfp4", {"gfx950"}),
        ("bf16+fp8", {"sm90", "sm100", "cpu"}),
    ],
)
def test_a_precision_that_kernels_would_misread_is_refused(
    target: str, version: str, precision: str, readers: set[str]
) -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52, precision=precision)
    if target in readers:
        refuse_unsound(plan, target, version)
        return
    with pytest.raises(RecipeError, match=f"{re.escape(precision)} on {target}, sglang {version}: found"):
        refuse_unsound(plan, target, version)


def test_without_aiter_what_only_its_kernels_read_is_refused_with_the_switch() -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52, precision="mxfp4")
    refuse_unsound(plan, "gfx950", "0.5.23", aiter=True)
    with pytest.raises(RecipeError, match="export SGLANG_USE_AITER=1"):
        refuse_unsound(plan, "gfx950", "0.5.23", aiter=False)
    refuse_unsound(resolve(load_recipe("glm_moe_dsa"), GLM_52, precision="fp8"), "gfx950", "0.5.23", aiter=False)


def test_one_misread_group_is_enough() -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52, precision={"decoder": "fp8", "nextn": "bf16+fp8"})
    with pytest.raises(RecipeError, match=r"bf16\+fp8 on gfx950"):
        refuse_unsound(plan, "gfx950", "0.5.23")


def test_glm_5_3_flash_has_kv_b_in_one_layer_of_four() -> None:
    text = {**GLM_52, "num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["indexed_attention"]) * 2}
    plan = resolve(
        load_recipe("glm5_next"), {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": text}
    )
    assert [(module.layer, module.group) for module in plan.modules] == [(3, "decoder"), (7, "decoder"), (8, "nextn")]
    assert plan.modules[0].source == "model.language_model.layers.3.self_attn.kv_b_proj"


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("fp6", "no pipeline of this precision"),
        ({"encoder": "fp8"}, "precision for encoder: found an unknown layer group"),
        ("fp8+bf16", "w_kc and w_vc in different precisions"),
        ({"decoder": "bf16+mxfp4"}, "reads w_kc's dtype"),
    ],
)
def test_refused_precisions(precision: str | dict[str, str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        resolve(load_recipe("glm_moe_dsa"), GLM_52, precision=precision)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": None}, r"config\.json: kv_lora_rank: found nothing"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: found 0"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank: found '512'"),
        ({"num_attention_heads": True}, "num_attention_heads: found True"),
        ({"num_hidden_layers": None}, "num_hidden_layers: found nothing"),
        ({"num_hidden_layers": 10**9}, "at most 10000 layers"),
        ({"num_hidden_layers": -3}, "layers"),
        ({"num_nextn_predict_layers": -3}, "layers"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
    ],
)
def test_bad_configs(change: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        resolve(load_recipe("glm_moe_dsa"), {**GLM_52, **change})


def test_contract_of_a_rank() -> None:
    plan = resolve(load_recipe("glm_moe_dsa"), GLM_52)
    contract = plan.contract("fp8_absorbed", heads=8)
    assert contract["w_kc"].shape == (8, 192, 512)
    assert contract["w_kc"].strides == (192 * 512, 1, 192)
    assert contract["w_vc"].shape == (8, 512, 256)
    assert contract["w_vc"].strides == (512 * 256, 1, 512)
    assert (contract["w_scale"].dtype, contract["w_scale"].shape) == (torch.float32, ())
    assert plan.contract("fp8_absorbed")["w_kc"].shape == (64, 192, 512)
    assert plan.contract("fp8_absorbed", target="gfx942")["w_kc"].dtype is torch.float8_e4m3fnuz
    assert plan.contract("mxfp4_absorbed", heads=8)["w_scale_k"].shape == (8, 6, 512)
    with pytest.raises(RecipeError, match="no such contract"):
        plan.contract("fp9_absorbed")


def user_recipe(directory: Path, module: str, layers: str) -> Recipe:
    text = f"""
schema: 1
name: mine
architectures: [HybridForCausalLM]
dims: {{experts: n_routed_experts, rows: moe_intermediate_size, cols: hidden_size}}
layers:
  decoder: {layers}
modules:
  part:
    source: "{module}"
    {"each: {e: n_routed_experts}" if "{e}" in module else ""}
    on: [decoder]
    store: [{{dequantize: {{}}}}, {{quantize_fp8: {{granularity: channel}}}}]
    ensures: stored
contracts:
  stored:
    weight: {{dtype: float8_e4m3fn, shape: [rows, cols]}}
    scale: {{dtype: float32, shape: [rows, 1], finite: true, positive: true}}
"""
    path = directory / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


HYBRID: dict[str, object] = {
    "architectures": ["HybridForCausalLM"],
    "num_hidden_layers": 4,
    "n_routed_experts": 3,
    "moe_intermediate_size": 64,
    "hidden_size": 32,
}


def test_experts_are_named_one_by_one(tmp_path: Path) -> None:
    layers = '{prefix: "model.layers.{i}", first: 1, count: num_hidden_layers - 1}'
    recipe = user_recipe(tmp_path, "{prefix}.mlp.experts.{e}.up_proj", layers)
    plan = resolve(recipe, HYBRID)
    assert len(plan.modules) == 9
    assert plan.modules[4].source == "model.layers.2.mlp.experts.1.up_proj"
    assert plan.contract("stored")["scale"].shape == (64, 1)


def test_layers_without_the_module_are_told_by_the_config(tmp_path: Path) -> None:
    layers = '{prefix: "model.layers.{i}", first: 0, count: num_hidden_layers, only: {layer_types: [full_attention]}}'
    recipe = user_recipe(tmp_path, "{prefix}.self_attn.kv_b_proj", layers)
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    assert [m.layer for m in resolve(recipe, {**HYBRID, "layer_types": kinds}).modules] == [1, 3]
    assert [m.layer for m in resolve(recipe, HYBRID).modules] == [0, 1, 2, 3]
    for wrong in (kinds[:3], "full_attention"):
        with pytest.raises(RecipeError, match=r"config\.json: layer_types"):
            resolve(recipe, {**HYBRID, "layer_types": wrong})


def test_a_hostile_count_of_experts(tmp_path: Path) -> None:
    layers = '{prefix: "model.layers.{i}", first: 0, count: num_hidden_layers}'
    recipe = user_recipe(tmp_path, "{prefix}.mlp.experts.{e}.up_proj", layers)
    with pytest.raises(RecipeError, match="at most"):
        resolve(recipe, {**HYBRID, "n_routed_experts": 10**9})
