"""Exclude lists: every published way of naming a module is understood, and nothing is taken for another module."""

from __future__ import annotations

import json

import pytest
from sglang.srt.layers.quantization.quark.utils import should_ignore_layer
from sglang.srt.layers.quantization.utils import is_layer_skipped

from weightprep.checkpoint.config import ModelConfig, read_config
from weightprep.checkpoint.exclude import EXCLUDE_KEYS, read_exclude_list
from weightprep.checkpoint.repository import Checkpoint
from weightprep.errors import CheckpointError
from weightprep.synth import synthesize

KV_B = "model.layers.3.self_attn.kv_b_proj"
NEXTN = ("model.layers.78",)


def config(method: str | None, entries: object, key: str = "exclude") -> ModelConfig:
    quantization = {"quant_method": method, key: entries} if method else None
    return ModelConfig({}, (), quantization, None)


def excluded(module: str, entry: str, method: str = "quark", nextn: tuple[str, ...] = NEXTN) -> bool:
    found = read_exclude_list(config(method, ["lm_head", entry]), nextn).entry_for(module)
    assert found is None or found.text == entry
    return found is not None


@pytest.mark.parametrize("key", EXCLUDE_KEYS)
def test_every_key(key):
    entries = read_exclude_list(config("quark", [KV_B], key))
    found = entries.entry_for(KV_B)
    assert found is not None
    assert (found.text, found.file, found.key) == (KV_B, "config.json", key)


def test_all_entries_that_cover_a_module():
    entries = read_exclude_list(config("quark", ["*self_attn*", "lm_head", KV_B, "re:.*kv_b_proj", "*mlp*"]))
    assert [entry.text for entry in entries.entries_for(KV_B)] == ["*self_attn*", KV_B, "re:.*kv_b_proj"]


def test_hf_quant_config_nested_and_flat():
    for quant in ({"quantization": {"exclude_modules": [KV_B]}}, {"exclude_modules": [KV_B]}):
        found = read_exclude_list(ModelConfig({}, (), None, quant)).entry_for(KV_B)
        assert found is not None
        assert found.file == "hf_quant_config.json"


@pytest.mark.parametrize("absent", [None, []])
def test_missing_and_null_lists_exclude_nothing(absent):
    assert read_exclude_list(config("fp8", absent)).entry_for(KV_B) is None
    assert read_exclude_list(config(None, None)).entries == ()


@pytest.mark.parametrize(
    ("module", "entry"),
    [
        (KV_B, KV_B),
        (KV_B, "layers.3.self_attn.kv_b_proj"),
        (KV_B, "language_model.model.layers.3.self_attn.kv_b_proj"),
        ("language_model." + KV_B, KV_B),
        ("language_model." + KV_B, "language_model.layers.3.self_attn.kv_b_proj"),
        ("language_model." + KV_B, "re:model.layers.*.self_attn.kv_b_proj"),
        (KV_B, "*self_attn*"),
        (KV_B, "*layers.3.*"),
        (KV_B, "re:model.layers.*.self_attn.kv_b_proj"),
        (KV_B, r"re:.*\.self_attn\..*"),
        (KV_B, r"re:^(?!.*o_proj).*$"),
        ("model.layers.3.self_attn.q_a_proj", "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa"),
        ("model.layers.3.self_attn.fused_qkv_a_proj_with_mqa", "model.layers.3.self_attn.q_a_proj"),
        ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.gate_up_proj"),
        ("model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.experts"),
        ("model.layers.3.mlp.experts", "model.layers.3.mlp.experts.0.up_proj"),
        ("model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.experts.0.up_proj"),
        ("model.layers.78.self_attn.kv_b_proj", "model.decoder.self_attn.kv_b_proj"),
        ("model.layers.78.eh_proj", "model.eh_proj"),
        ("model.layers.78.shared_head.head", "model.shared_head.head"),
        ("model.layers.78.mlp.gate_proj", "model.decoder.mlp.gate_up_proj"),
        ("model.layers.78.mlp.experts.1.gate_proj", "model.decoder.mlp.experts"),
    ],
)
def test_names_that_mean_the_module(module, entry):
    assert excluded(module, entry)


@pytest.mark.parametrize(
    ("module", "entry"),
    [
        (KV_B, "model.layers.3.self_attn.kv_b"),
        (KV_B, "model.layers.33.self_attn.kv_b_proj"),
        (KV_B, "model.layers.3.self_attn"),
        (KV_B, "self_attn.kv_b_proj"),
        (KV_B, "*layers.33*"),
        (KV_B, "self_attn*"),
        (KV_B, "re:self_attn"),
        (KV_B, "model.decoder.self_attn.kv_b_proj"),
        ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate_up_proj"),
        ("model.layers.78.self_attn.kv_b_proj", "model.self_attn.kv_b_proj"),
        ("model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.experts"),
    ],
)
def test_names_that_mean_something_else(module, entry):
    assert not excluded(module, entry)


@pytest.mark.parametrize(
    ("method", "reached"),
    [
        ("fp8", {KV_B, "model.layers.3.self_attn", "self_attn", "self_attn.kv_b_proj", "kv_b_proj"}),
        ("compressed-tensors", {KV_B, "self_attn.kv_b_proj", "kv_b_proj"}),
        ("quark", {KV_B}),
        ("modelopt", {KV_B, "self_attn", "kv_b_proj"}),
        ("something new", {KV_B, "model.layers.3.self_attn", "self_attn", "self_attn.kv_b_proj", "kv_b_proj"}),
    ],
)
def test_how_far_a_plain_name_reaches_is_the_methods(method, reached):
    candidates = {KV_B, "model.layers.3.self_attn", "self_attn", "self_attn.kv_b_proj", "kv_b_proj", "attn", "kv_b"}
    assert {entry for entry in candidates if excluded(KV_B, entry, method)} == reached


def test_modelopt_globs_match_parts():
    assert excluded("model.x.mtp_block", "mtp*", "modelopt")
    assert not excluded("mtp_block.layers.0.x", "tp*", "modelopt")
    assert not excluded("model.x.mtp_block", "mtp*", "quark")


@pytest.mark.parametrize("entry", [KV_B, "*self_attn*", "re:model.layers.3.*", "model.layers.3.self_attn", "lm_head"])
def test_never_narrower_than_sglangs_own_reading(entry):
    """What sglang's functions leave unquantized, this matcher must report as excluded."""
    for module in (KV_B, "lm_head", "model.layers.3.mlp.experts"):
        if should_ignore_layer(module, [entry]):
            assert read_exclude_list(config("quark", [entry])).entry_for(module)
        if is_layer_skipped(module, [entry]):
            assert read_exclude_list(config("fp8", [entry])).entry_for(module)


def test_unmatched_entries_of_a_glm_checkpoint(tmp_path):
    """The published list calls indexer.weights_proj by a name that no tensor has."""
    synthesize(tmp_path, layers=4, encoding="fp8_block")
    checkpoint = Checkpoint.open(tmp_path)
    excludes = read_exclude_list(checkpoint.config, ["model.layers.4"])
    unmatched = [entry.text for entry in excludes.unmatched(checkpoint.tensors)]
    assert unmatched == [f"model.layers.{i}.self_attn.indexers_proj" for i in (0, 1, 2, 4)]
    assert excludes.entry_for("model.layers.4.self_attn.kv_b_proj") is None
    assert excludes.entry_for("model.layers.4.eh_proj") is not None


def test_unmatched_patterns():
    entries = ["*self_attn*", "*vision*", "re:.*kv_b.*", "re:.*absent.*", "lm_head"]
    excludes = read_exclude_list(config("quark", entries))
    names = [KV_B + ".weight", KV_B + ".weight_scale", "model.norm.weight"]
    assert [entry.text for entry in excludes.unmatched(names)] == ["*vision*", "re:.*absent.*", "lm_head"]


def test_expanded_list_of_a_quark_checkpoint(tmp_path):
    synthesize(tmp_path, "deepseek_v3", layers=2, encoding="mxfp4_experts")
    config = read_config(tmp_path)
    excludes = read_exclude_list(config, ["model.layers.2"])
    assert all(excludes.entry_for(f"model.layers.{i}.self_attn.kv_b_proj") for i in range(3))
    assert not excludes.entry_for("model.layers.1.mlp.experts.0.up_proj")
    assert not excludes.unmatched(Checkpoint.open(tmp_path).tensors)


@pytest.mark.parametrize("entries", ["lm_head", [1], {"a": 1}, [None]])
def test_refuses_what_is_no_list_of_strings(entries):
    with pytest.raises(CheckpointError, match="list of strings"):
        read_exclude_list(config("fp8", entries))


@pytest.mark.parametrize("text", ["re:(", "re:[", "re:(a+)+$", "re:(a|a)*b", "re:(x{1,}){2,}", "re:" + ".*" * 30 + "z"])
def test_refuses_patterns_that_are_wrong_or_could_run_for_ever(text):
    with pytest.raises(CheckpointError, match=r"config\.json: exclude"):
        read_exclude_list(config("quark", [text]))


def test_a_glob_of_many_stars_ends():
    """Backtracking through 60 stars would not come back within the life of this test."""
    assert not excluded("model." + "a" * 200 + ".b", "*a" * 60 + "z")


def test_key_order_of_files(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "modelopt", "ignore": ["a"]}})
    )
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"exclude_modules": ["a", "b"]}}))
    excludes = read_exclude_list(read_config(tmp_path))
    assert [(e.text, e.file) for e in excludes.entries] == [
        ("a", "config.json"),
        ("a", "hf_quant_config.json"),
        ("b", "hf_quant_config.json"),
    ]
