"""What the result's config declares is held against the result's tensors: verify does not take convert's editor's word.

The faults are put into the editor itself, which convert and verify share: a comparison with its output sees none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightprep.checkpoint.config import ModelConfig
from weightprep.cli import app
from weightprep.convert import inline
from weightprep.convert.declared import check_declared
from weightprep.convert.quant_config import Modules, edit_config
from weightprep.convert.reread import Finding, Stored, read_all
from weightprep.convert.verify import verify
from weightprep.synth import synthesize

KV_B = "model.layers.1.self_attn.kv_b_proj"
DRAFT = "model.layers.2.self_attn"
SMALL = {"n_routed_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}

Change = Callable[[dict[str, Any]], object]


def converted(source: Path, destination: Path) -> Path:
    done = CliRunner().invoke(app, ["convert", str(source), str(destination), "--requantize"])
    assert done.exit_code == 0, done.output
    return destination


@pytest.mark.parametrize(
    ("arch", "encoding"),
    [
        ("glm_moe_dsa", "fp16"),
        ("glm_moe_dsa", "fp32"),
        ("kimi_k25", "bf16"),
        ("deepseek_v3", "fp8_block"),
        ("deepseek_v3", "fp8_block_quark"),
        ("deepseek_v3", "fp8_channel"),
        ("deepseek_v3", "mxfp4"),
        ("deepseek_v3", "mxfp4_experts"),
        ("deepseek_v3", "mxfp4_attn_fp8"),
        ("kimi_k25", "int4_experts"),
    ],
)
def test_nothing_is_found_in_a_sound_result(tmp_path: Path, arch: str, encoding: str) -> None:
    source = synthesize(tmp_path / "src", arch, encoding=encoding, layers=2, shards=2, overrides=SMALL)
    verdict = verify(source, converted(source, tmp_path / "dst"))
    assert verdict.modules >= 2
    assert verdict.findings == ()


def excluding(*names: str) -> Change:
    return lambda quantization: quantization["modules_to_not_convert"].extend(names)


def listing(change: Callable[[list[str]], list[str]]) -> Change:
    def edit(quantization: dict[str, Any]) -> None:
        quantization["modules_to_not_convert"] = change(quantization["modules_to_not_convert"])

    return edit


def without(part: str) -> Change:
    return listing(lambda names: [name for name in names if part not in name])


def faulty(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the editor of configs, convert's and verify's, make this mistake."""

    def edited(config: ModelConfig, modules: Modules) -> dict[str, Any]:
        raw = edit_config(config, modules)
        holder = raw if "quantization_config" in raw else raw["text_config"]
        change(holder["quantization_config"])
        return raw

    monkeypatch.setattr(inline, "edit_config", edited)


@pytest.mark.parametrize(
    ("encoding", "change", "subject", "found"),
    [
        ("bf16", excluding(KV_B), KV_B, "leaves it unquantized"),
        ("bf16", excluding("model.layers.1.self_attn"), KV_B, "leaves it unquantized"),
        # the draft model's own name of the NextN layer's
        ("bf16", excluding("model.decoder.self_attn.kv_b_proj"), f"{DRAFT}.kv_b_proj", "leaves it unquantized"),
        ("bf16", listing(lambda names: names[3:]), "", "nothing that excludes"),
        ("bf16", without("lm_head"), "lm_head", "nothing that excludes lm_head"),
        ("bf16", without("model.decoder"), f"{DRAFT}.o_proj", "nothing that excludes model.decoder.self_attn.o_proj"),
        ("bf16", without("fused"), "fused_qkv_a_proj_with_mqa", "nothing that excludes"),
        ("bf16", without("mlp.experts"), "model.layers.1.mlp.experts", "nothing that excludes"),
        ("bf16", lambda made: made.update(weight_block_size=[64, 64]), KV_B, "every block of 64x64"),
        ("bf16", lambda made: made.pop("weight_block_size"), KV_B, "*.weight_scale, one for the weight"),
        ("bf16", lambda made: made.update(scale_fmt="ue8m0"), KV_B, "powers of two"),
        ("bf16", lambda made: made.update(activation_scheme="static"), KV_B, "activation_scheme 'static'"),
        ("bf16", lambda made: made.update(quant_method="awq"), KV_B, "quant_method 'awq'"),
        ("bf16", lambda made: made.update(modules_to_not_convert="lm_head"), "modules_to_not_convert", "a JSON str"),
        ("mxfp4_experts", lambda made: made["layer_quant_config"].pop(KV_B), KV_B, "fp4 per_group"),
        ("mxfp4_experts", lambda made: made["exclude"].append("re:.*kv_b.*"), KV_B, "'re:.*kv_b.*'"),
        (
            "mxfp4_experts",
            lambda made: made["layer_quant_config"].pop("model.decoder.self_attn.kv_b_proj"),
            "(as model.decoder.self_attn.kv_b_proj)",
            "fp4 per_group",
        ),
        (
            "mxfp4_experts",
            lambda made: made["layer_quant_config"][KV_B]["weight"].update(qscheme="per_channel"),
            KV_B,
            "fp8_e4m3 per_channel",
        ),
        (
            # the first pattern that matches decides
            "mxfp4_attn_fp8",
            lambda made: made.update(layer_quant_config=dict(reversed(made["layer_quant_config"].items()))),
            KV_B,
            "fp8_e4m3 per_channel",
        ),
    ],
)
def test_a_fault_of_the_editor_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, change: Change, subject: str, found: str
) -> None:
    faulty(monkeypatch, change)
    source = synthesize(tmp_path / "src", "deepseek_v3", encoding=encoding, layers=2, shards=1, overrides=SMALL)
    findings = verify(source, converted(source, tmp_path / "dst")).findings
    assert any(subject in finding.subject and found in finding.found for finding in findings), findings
    assert all("config.json" in finding.subject for finding in findings)


def test_verify_fails_and_names_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, excluding(KV_B))
    source = synthesize(tmp_path / "src", layers=2, shards=1)
    destination = converted(source, tmp_path / "dst")
    outcome = CliRunner().invoke(app, ["verify", str(source), str(destination)])
    assert outcome.exit_code == 1
    assert f"config.json: quantization_config: {KV_B}" in outcome.output


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (without("vision_tower"), "vision_tower"),
        # what sglang calls them, and what transformers calls them
        (listing(lambda names: [name for name in names if not name.startswith("model.layers.0")]), "model.layers.0"),
        (listing(lambda names: [name for name in names if "model.language_model" not in name]), "model.language_model"),
    ],
)
def test_a_wrapper_is_asked_for_by_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, missing: str
) -> None:
    faulty(monkeypatch, change)
    source = synthesize(tmp_path / "src", "kimi_k25", layers=2, shards=1, overrides=SMALL)
    findings = verify(source, converted(source, tmp_path / "dst")).findings
    assert findings
    assert all(finding.found.startswith(f"nothing that excludes {missing}") for finding in findings)


WEIGHT = "language_model.model.layers.1.self_attn.kv_b_proj"
NAMES = [WEIGHT, WEIGHT.removeprefix("language_model."), f"model.{WEIGHT.replace('model.model', 'model')}"]
OURS = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True},
    "format": "float-quantized",
}
THEIRS = {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}, "format": "pack-quantized"}
BY_NAME = {**OURS, "targets": NAMES}
BY_PATTERN = {**OURS, "targets": [f"re:{name.replace('.', chr(92) + '.').replace('1', '(0|1)')}$" for name in NAMES]}
LINEAR = {**THEIRS, "targets": ["Linear"]}


def declared(root: Path, groups: Mapping[str, object], *, scale: tuple[int, ...] = (1,)) -> list[Finding]:
    text = {
        "num_hidden_layers": 2,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": groups,
        },
    }
    (root / "config.json").write_text(json.dumps({"text_config": text}))
    tensors = {
        f"{WEIGHT}.weight": Stored(f"{WEIGHT}.weight", root, "F8_E4M3", (256, 128), 0, 256 * 128),
        f"{WEIGHT}.weight_scale": Stored(f"{WEIGHT}.weight_scale", root, "F32", scale, 0, 4),
    }
    return list(check_declared(root, tensors, [WEIGHT], is_whole=False))


@pytest.mark.parametrize(
    "groups",
    [
        {"group_0": LINEAR, "weightprep": BY_NAME},
        {"weightprep": BY_PATTERN, "group_0": LINEAR},
        {"weightprep": BY_PATTERN, "group_0": {**THEIRS, "targets": ["re:.*self_attn.*", "Linear"]}},
    ],
    ids=["names behind a kind", "patterns", "patterns before other patterns"],
)
def test_compressed_tensors_declared_as_stored(tmp_path: Path, groups: Mapping[str, object]) -> None:
    assert declared(tmp_path, groups) == []


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ({"group_0": LINEAR}, "int of 4 bits, one scale per group, pack-quantized, by group_0"),
        ({"group_0": {**THEIRS, "targets": ["re:.*self_attn.*"]}, "weightprep": BY_NAME}, "by group_0"),
        ({"weightprep": {**BY_NAME, "targets": NAMES[:1]}, "group_0": LINEAR}, "by group_0"),
        ({"weightprep": {**BY_PATTERN, "targets": BY_PATTERN["targets"][:1]}}, "no target fits it"),
        ({"weightprep": {**BY_NAME, "format": None}}, "pack-quantized, by weightprep"),
        ({"weightprep": {**BY_NAME, "weights": {**OURS["weights"], "strategy": "channel"}}}, "one scale per channel"),  # type: ignore[dict-item]
        ({"weightprep": {**BY_NAME, "input_activations": {"dynamic": False}}}, "scales of its activations"),
        ({"weightprep": {**OURS, "targets": ["re:(a+)+$"]}}, "'(a+)+$'"),
        ([], "no target fits it"),
    ],
)
def test_compressed_tensors_declared_otherwise(tmp_path: Path, groups: Mapping[str, object], found: str) -> None:
    (finding,) = declared(tmp_path, groups)
    assert found in finding.found


def test_a_scale_of_another_shape_is_not_what_is_declared(tmp_path: Path) -> None:
    (finding,) = declared(tmp_path, {"weightprep": BY_NAME}, scale=(256,))
    assert finding.found == "declared as fp8 with scales named *.weight_scale, one for the weight"


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [KV_B]}, None),
        ({"quant_method": "quark", "exclude": [KV_B], "global_quant_config": {}}, None),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
            "declared as fp8 with scales named *.weight_scale_inv, one for every block of 128x128",
        ),
        ({"quant_method": "quark", "exclude": [], "global_quant_config": {"weight": {"dtype": "fp4"}}}, "fp4"),
    ],
)
def test_a_weight_that_is_stored_unquantized_is_excluded(
    tmp_path: Path, quantization: dict[str, object] | None, found: str | None
) -> None:
    config = {"num_hidden_layers": 2, **({} if quantization is None else {"quantization_config": quantization})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"{KV_B}.weight": Stored(f"{KV_B}.weight", tmp_path, "BF16", (256, 128), 0, 2 * 256 * 128)}
    findings = list(check_declared(tmp_path, tensors, [KV_B], is_whole=quantization is None))
    assert [found in finding.found for finding in findings if found] == [True] * (found is not None)
    assert bool(findings) == (found is not None)


def test_without_a_config_fp8_is_declared_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"{KV_B}.weight": Stored(f"{KV_B}.weight", tmp_path, "F8_E4M3", (256, 128), 0, 256 * 128)}
    (finding,) = check_declared(tmp_path, tensors, [KV_B], is_whole=True)
    assert finding.found == "declared as quant_method None"


def test_the_second_list_of_excluded_modules_counts(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, shards=1)
    destination = converted(source, tmp_path / "dst")
    (destination / "hf_quant_config.json").write_text(json.dumps({"quantization": {"exclude_modules": [KV_B]}}))
    tensors, _, _ = read_all(destination.glob("*.safetensors"))
    (finding,) = check_declared(destination, tensors, [KV_B, "model.layers.0.self_attn.kv_b_proj"], is_whole=False)
    assert finding.subject.endswith(KV_B)
    assert finding.found.startswith("hf_quant_config.json leaves it unquantized")


def test_a_wrapper_inside_of_the_model_is_asked_for_by_sglangs_name(tmp_path: Path) -> None:
    """GLM-5.3-Flash: sglang renames plain names, but no regular expression."""
    module = "model.language_model.layers.3.self_attn.kv_b_proj"
    tensors = {
        f"{module}.weight": Stored(f"{module}.weight", tmp_path, "F8_E4M3", (512, 64), 0, 512 * 64),
        f"{module}.weight_scale": Stored(f"{module}.weight_scale", tmp_path, "F32", (1,), 0, 4),
    }
    for pattern, count in ((r"re:model\.(language_model\.)?layers\.3\..*$", 0), (rf"re:{module}$", 1)):
        groups = {"ours": {**OURS, "targets": [pattern]}, "theirs": LINEAR}
        quantization = {"quant_method": "compressed-tensors", "config_groups": groups, "format": "pack-quantized"}
        text = {"num_hidden_layers": 4, "quantization_config": quantization}
        document = {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(document))
        found = list(check_declared(tmp_path, tensors, [module], is_whole=False))
        assert len(found) == count
