"""The edited configs: what changed, that nothing else did, and that the engines' own readers understand them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.declare import declare
from weightprep.convert.quant_config import Modules
from weightprep.errors import CheckpointError
from weightprep.synth import synthesize

KV_B = "model.layers.1.self_attn.kv_b_proj"
DRAFT_KV_B = "model.decoder.self_attn.kv_b_proj"


def convert(source: Path, *flags: str) -> tuple[dict[str, Any], Path]:
    destination = source.with_name("dst")
    result = CliRunner().invoke(app, ["convert", str(source), str(destination), *flags])
    assert result.exit_code == 0, result.stderr
    return json.loads((destination / "config.json").read_text()), destination


def edit(path: Path, **changes: object) -> dict[str, Any]:
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))
    return config


def stored(root: Path, name: str) -> torch.Tensor:
    index = json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]
    return load_file(root / index[name])[name]


def test_none_becomes_fp8_block_with_every_other_module_excluded(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2)
    before = json.loads((source / "config.json").read_text())

    after, destination = convert(source)

    made = after.pop("quantization_config")
    assert list(after.items()) == list(before.items())
    excluded = made.pop("modules_to_not_convert")
    assert made == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    for name in (
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_experts.gate_up_proj",
        "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa",
        "model.layers.1.self_attn.o_proj",
        "model.layers.2.self_attn.o_proj",
        "model.decoder.self_attn.o_proj",
        "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
        "model.decoder.mlp.experts",
        "model.eh_proj",
    ):
        assert name in excluded
    assert not [name for name in excluded if "kv_b_proj" in name]
    assert not [name for name in excluded if ".experts." in name]
    scale = stored(destination, f"{KV_B}.weight_scale_inv")
    rows, cols = stored(destination, f"{KV_B}.weight").shape
    assert tuple(scale.shape) == (-(-rows // 128), -(-cols // 128))
    assert scale.unique().numel() == 1


def test_kept_nextn_is_excluded_by_both_names(tmp_path: Path) -> None:
    after, _ = convert(synthesize(tmp_path / "src", layers=2), "--nextn", "keep")
    excluded = after["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.2.self_attn.kv_b_proj" in excluded
    assert DRAFT_KV_B in excluded
    assert KV_B not in excluded


def test_fp8_entry_is_taken_off_and_broad_ones_are_written_out(tmp_path: Path) -> None:
    """A bf16 kv_b_proj inside a block-fp8 checkpoint, excluded once by its name and once by its layer's."""
    source = synthesize(tmp_path / "src", layers=2)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "x_unknown": {"kept": True},
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.kv_b_proj", "model.layers.1", "indexers_proj"],
    }
    (source / "config.json").write_text(json.dumps(config))

    after, destination = convert(source)

    made = after["quantization_config"]
    assert list(made) == list(config["quantization_config"])
    assert made["x_unknown"] == {"kept": True}
    excluded = made["modules_to_not_convert"]
    assert (excluded[0], excluded[-1]) == ("lm_head", "indexers_proj")
    assert "model.layers.1" not in excluded
    assert "model.layers.1.self_attn.o_proj" in excluded
    assert "model.layers.1.mlp.experts" in excluded
    assert not [name for name in excluded if "kv_b_proj" in name]
    records = json.loads((destination / "weightprep.json").read_text())["modules"]
    assert [record["overrides_exclude"] for record in records] == [
        "model.layers.0.self_attn.kv_b_proj",
        "model.layers.1",
        None,
    ]


@pytest.mark.parametrize("entry", ["re:.*self_attn.*", "*self_attn*"])
def test_quark(tmp_path: Path, entry: str) -> None:
    source = synthesize(tmp_path / "src", layers=2, encoding="mxfp4_experts")
    exclude = json.loads((source / "config.json").read_text())["quantization_config"]["exclude"]
    rest = [name for name in exclude if "self_attn" not in name]
    before = edit(source / "config.json", exclude=[*rest, entry])["quantization_config"]

    after, destination = convert(source)

    made = after["quantization_config"]
    assert list(made) == list(before)
    assert entry not in made["exclude"]
    assert "model.layers.1.self_attn.o_proj" in made["exclude"]
    assert not [name for name in made["exclude"] if "kv_b_proj" in name]
    spec = made["layer_quant_config"][KV_B]
    assert (spec["weight"]["dtype"], spec["weight"]["qscheme"], spec["weight"]["is_dynamic"]) == (
        "fp8_e4m3",
        "per_tensor",
        False,
    )
    assert DRAFT_KV_B in made["layer_quant_config"]
    assert stored(destination, f"{KV_B}.weight_scale").shape == ()


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("compressed-tensors", "config_groups", []),
        ("compressed-tensors", "config_groups", ""),
        ("compressed-tensors", "config_groups", {"group_0": []}),
        ("quark", "layer_quant_config", True),
        ("quark", "layer_quant_config", []),
    ],
)
def test_schemes_that_are_no_objects_are_refused_by_name(method: str, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="wanted an object") as refusal:
        declare(
            {"quant_method": method, "format": "pack-quantized", key: value}, ["model.layers.0.self_attn.kv_b_proj"]
        )
    assert key in refusal.value.subject or "group_0" in refusal.value.subject


@pytest.mark.parametrize(("method", "key"), [("compressed-tensors", "config_groups"), ("quark", "layer_quant_config")])
@pytest.mark.parametrize("absent", ["{}", "null"])
def test_schemes_that_are_absent_are_begun(method: str, key: str, absent: str) -> None:
    quantization = {"quant_method": method, key: json.loads(absent)}
    declare(quantization, ["model.layers.0.self_attn.kv_b_proj"])
    assert len(quantization[key]) == 1


def test_entries_that_name_nothing_are_listed(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, encoding="fp8_block")
    edit(source / "config.json", modules_to_not_convert=["lm_head", "model.layers.0.self_attn.indexers_proj"])
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--requantize", "--dry-run", "--json"]
    document = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert document["unmatched_excludes"] == ["model.layers.0.self_attn.indexers_proj"]


SGLANG_METHOD = """
import sys
from sglang.srt.configs.model_config import ModelConfig
for path in sys.argv[1:]:
    try:
        print("method", ModelConfig(path).quantization)
    except ValueError as error:
        print("method", str(error).split(".")[0])
"""


def test_an_empty_quantization_config_is_none_and_is_replaced(tmp_path: Path) -> None:
    """sglang refuses the source, because of a method without a name, and reads the result."""
    pytest.importorskip("sglang", reason="sglang is not installed")
    source = synthesize(tmp_path / "src", layers=2)
    path = source / "config.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, "quantization_config": {}}))

    after, destination = convert(source)

    assert after["quantization_config"]["quant_method"] == "fp8"
    assert CliRunner().invoke(app, ["verify", str(source), str(destination)]).exit_code == 0
    assert {key: value for key, value in after.items() if key != "quantization_config"} == before
    arguments = [sys.executable, "-c", SGLANG_METHOD, str(source), str(destination)]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    told = [line for line in done.stdout.splitlines() if line.startswith("method ")]
    assert told == ["method Unknown quantization method: ", "method fp8"]


def test_an_empty_quantization_config_says_nothing_of_quantized_tensors(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, encoding="fp8_block")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {}}))
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst"), "--requantize"])
    assert done.exit_code == 2
    assert "none, and a quantized tensor beside it" in done.stderr
    assert "--layout sidecar" in done.stderr


def test_quark_is_understood_by_sglang(tmp_path: Path) -> None:
    """sglang's own reader, without a device: which layers it builds quantized, and by which scheme."""
    quark = pytest.importorskip("sglang.srt.layers.quantization.quark.quark", reason="sglang is not installed")
    from sglang.srt.layers.quantization.quark import utils

    after, _ = convert(synthesize(tmp_path / "src", layers=2, encoding="mxfp4_experts"))

    config = quark.QuarkConfig.from_config({**after["quantization_config"], "packed_modules_mapping": {}})

    for name in (KV_B, DRAFT_KV_B):
        assert not utils.should_ignore_layer(name, config.exclude_layers)
        spec = config._find_matched_config(name, torch.nn.Linear(1, 1))
        assert config._is_fp8_w8a8(spec["weight"], spec["input_tensors"])
    assert utils.should_ignore_layer("model.layers.1.self_attn.o_proj", config.exclude_layers)
    spec = config._find_matched_config("model.layers.1.mlp.experts", torch.nn.Linear(1, 1))
    assert config._is_mx_fp4(spec["weight"], spec["input_tensors"])


def test_fp8_is_understood_by_sglang(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("sglang.srt.layers.quantization.fp8", reason="sglang is not installed")
    from sglang.srt.layers.quantization import utils

    after, _ = convert(synthesize(tmp_path / "src", layers=2))

    config = fp8.Fp8Config.from_config(after["quantization_config"])

    for name in (KV_B, DRAFT_KV_B):
        assert not utils.is_layer_skipped(name, config.ignored_layers)
    for name in (
        "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa",
        "model.layers.1.mlp.experts",
        "model.layers.0.mlp.gate_up_proj",
        "model.decoder.mlp.shared_experts.gate_up_proj",
        "model.eh_proj",
    ):
        assert utils.is_layer_skipped(name, config.ignored_layers)


def test_compressed_tensors_in_a_wrapper(tmp_path: Path) -> None:
    """Kimi K2.5: experts in packed int4, the quantization_config under text_config."""
    source = synthesize(tmp_path / "src", "kimi_k25", layers=2, encoding="int4_experts")
    before = json.loads((source / "config.json").read_text())

    after, destination = convert(source)

    assert list(after) == list(before)
    made = after["text_config"]["quantization_config"]
    # sglang builds packed experts by the format at the top alone
    assert made["format"] == "pack-quantized"
    assert made["config_groups"]["group_0"]["format"] == "pack-quantized"
    group = made["config_groups"]["weightprep"]
    assert group["format"] == "float-quantized"
    module = "language_model.model.layers.1.self_attn.kv_b_proj"
    # the checkpoint's name, sglang's and transformers'
    for spelled in ("language_model.model", "model", "model.language_model"):
        for name, is_ours in (
            ("1.self_attn.kv_b_proj", True),
            ("11.self_attn.kv_b_proj", False),
            ("1.self_attn.o_proj", False),
        ):
            full = f"{spelled}.layers.{name}"
            assert any(re.match(target.removeprefix("re:"), full) for target in group["targets"]) is is_ours
        assert f"{spelled}.layers.1.self_attn.o_proj" in made["ignore"]
    assert not [name for name in made["ignore"] if "kv_b_proj" in name]
    assert stored(destination, f"{module}.weight_scale").shape == (1,)
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    read = quantization.QuantizationConfig.model_validate(made)
    assert read.config_groups["weightprep"].weights.strategy == "tensor"
    # transformers takes the experts' numbers from the group that this finds
    integration = pytest.importorskip("transformers.integrations.compressed_tensors", reason="no transformers")
    assert integration.get_experts_scheme(read).format == "pack-quantized"


@pytest.mark.parametrize(("model", "encoding"), [("kimi_k25", "int4_experts"), ("deepseek_v3", "fp8_block")])
def test_compression_config_is_edited_as_its_twin_is(tmp_path: Path, model: str, encoding: str) -> None:
    """sglang reads it where there is no quantization_config, and a new one would hide it."""
    twins = []
    for name in ("usual", "renamed"):
        (tmp_path / name).mkdir()
        source = synthesize(tmp_path / name / "src", model, layers=2, encoding=encoding)
        if name == "renamed":
            config = json.loads((source / "config.json").read_text())
            holder = config if "quantization_config" in config else config["text_config"]
            config["compression_config"] = holder.pop("quantization_config")
            (source / "config.json").write_text(json.dumps(config))
        twins.append(convert(source, "--requantize"))

    (usual, expected), (renamed, destination) = twins

    made = renamed.pop("compression_config")
    assert made == (usual if "quantization_config" in usual else usual["text_config"])["quantization_config"]
    assert "quantization_config" not in {**renamed, **renamed.get("text_config", {})}
    names = json.loads((expected / "model.safetensors.index.json").read_text())["weight_map"]
    assert names == json.loads((destination / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize(("model", "encoding"), [("kimi_k25", "int4_experts"), ("deepseek_v3", "fp8_block")])
def test_quantized_tensors_that_no_config_declares_are_refused_inline(
    tmp_path: Path, model: str, encoding: str
) -> None:
    source = synthesize(tmp_path / "src", model, layers=2, encoding=encoding)
    config = json.loads((source / "config.json").read_text())
    (config if "quantization_config" in config else config["text_config"]).pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))

    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst"), "--requantize"])
    assert result.exit_code == 2
    assert "a quantized tensor beside it: " in result.stderr
    assert "--layout sidecar" in result.stderr
    assert not (tmp_path / "dst").exists()

    convert(source, "--requantize", "--layout", "sidecar")


def test_hf_quant_config_alone_is_refused_inline(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2)
    (source / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*kv_b*"]}}'
    )
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst")])
    assert result.exit_code == 2
    assert "--layout sidecar" in result.stderr


def test_hf_quant_config_is_edited_along(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, encoding="fp8_block")
    listed = {"z_unknown": 1, "producer": {"name": "x"}, "quantization": {"exclude_modules": [KV_B, "lm_head"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(listed))

    _, destination = convert(source, "--requantize")

    made = json.loads((destination / "hf_quant_config.json").read_text())
    assert made == listed | {"quantization": {"exclude_modules": ["lm_head"]}}
    assert list(made) == list(listed)


@pytest.mark.parametrize(
    ("encoding", "key"),
    [("fp8_block", "modules_to_not_convert"), ("fp8_block", "ignored_layers"), ("mxfp4", "exclude")],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_what_becomes_bf16_is_put_on_the_list(is_listed: bool, encoding: str, key: str, tmp_path: Path) -> None:
    """By the name that the checkpoint has for it and by the draft's; a list is begun where there is none."""
    source = synthesize(tmp_path / "src", layers=2, encoding=encoding)
    config = json.loads((source / "config.json").read_text())
    quantization = config["quantization_config"]
    for other in ("modules_to_not_convert", "ignored_layers", "exclude"):
        quantization.pop(other, None)
    if is_listed:
        quantization[key] = ["lm_head"]
    elif key == "ignored_layers":
        key = "modules_to_not_convert"
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text('{"quantization": {"exclude_modules": ["lm_head"]}}')

    after, destination = convert(source, "--precision", "bf16", "--requantize")

    names = [f"{where}.self_attn.kv_b_proj" for where in ("model.layers.0", "model.layers.1", "model.layers.2")]
    made = after["quantization_config"][key]
    assert made[: 1 if is_listed else 0] == (["lm_head"] if is_listed else [])
    assert {*names, DRAFT_KV_B} <= set(made)
    assert after == {**config, "quantization_config": {**quantization, key: made}}
    beside = json.loads((destination / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert beside == ["lm_head", *(name for name in made if name != "lm_head")]
    assert stored(destination, f"{KV_B}.weight").dtype is torch.bfloat16
    index = json.loads((destination / "model.safetensors.index.json").read_text())["weight_map"]
    assert not [name for name in index if "kv_b_proj.weight_scale" in name]


def test_numbers_that_become_bf16_need_no_config(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, encoding="fp32")
    before = json.loads((source / "config.json").read_text())
    after, destination = convert(source, "--precision", "bf16")
    assert after == before
    assert stored(destination, f"{KV_B}.weight").dtype is torch.bfloat16


def test_a_second_conversion_of_compressed_tensors_keeps_the_first_ones_group(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", "deepseek_v3", layers=2, encoding="int4_experts")
    for arguments in ((source, tmp_path / "one", "--nextn", "keep"), (tmp_path / "one", tmp_path / "two")):
        result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        assert result.exit_code == 0, result.output
    groups = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert list(groups) == ["weightprep_2", "weightprep", "group_0"]
    for layer, key in (("layers.0", "weightprep"), ("layers.2", "weightprep_2"), ("decoder", "weightprep_2")):
        name = f"model.{layer}.self_attn.kv_b_proj"
        fits = [key for key, group in groups.items() if any(re.match(t[3:], name) for t in group["targets"])]
        assert fits == [key]
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "one"), str(tmp_path / "two")])
    assert verified.exit_code == 0, verified.output


def test_a_wrapper_that_stands_inside_of_the_model_is_spelled_as_sglang_does() -> None:
    """GLM-5.3-Flash: sglang renames plain names of a config, but no regular expression."""
    module = "model.language_model.layers.3.self_attn.kv_b_proj"
    modules = Modules([module], [], [module], ["model.language_model.layers.4"], "model.language_model.")
    quantization: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {}}
    declare(quantization, modules.quantized_names)
    (group,) = quantization["config_groups"].values()
    for name in (module, "model.layers.3.self_attn.kv_b_proj"):
        assert any(re.match(target[3:], name) for target in group["targets"])
