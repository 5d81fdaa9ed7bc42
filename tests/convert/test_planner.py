"""Planning covers every module that the recipe names, or refuses; nothing is left as it is in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.options import ConvertOptions
from weightprep.convert.planner import plan_contents
from weightprep.errors import RecipeError, WeightprepError
from weightprep.synth import synthesize

NEXTN_KV_B = "model.layers.2.self_attn.kv_b_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return synthesize(tmp_path / "src", layers=2, shards=1)


def edit_config(root: Path, change: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((root / "config.json").read_text())
    change(config)
    (root / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "outside"),
    [
        (lambda config: config.pop("num_nextn_predict_layers"), [NEXTN_KV_B]),
        (lambda config: config.update(num_nextn_predict_layers=None), [NEXTN_KV_B]),
        (lambda config: config.update(num_hidden_layers=1), [NEXTN_KV_B]),
        (
            lambda config: config.update(num_hidden_layers=1, num_nextn_predict_layers=0),
            ["model.layers.1.self_attn.kv_b_proj", NEXTN_KV_B],
        ),
    ],
    ids=["no NextN count", "null NextN count", "too few layers", "too few of both"],
)
@pytest.mark.parametrize("nextn", ["convert", "keep"])
def test_modules_outside_the_planned_layers_are_refused(
    source: Path, tmp_path: Path, change: Callable[[dict[str, object]], object], outside: list[str], nextn: str
) -> None:
    edit_config(source, change)
    with pytest.raises(RecipeError) as raised:
        plan_contents(ConvertOptions(source, tmp_path / "dst", nextn=nextn))  # type: ignore[arg-type]
    for module in outside:
        assert module in str(raised.value)
    assert "3 modules" in raised.value.found
    assert f"{3 - len(outside)}" in raised.value.wanted


@pytest.mark.parametrize("arguments", [["convert", "SRC", "DST"], ["inspect", "SRC"], ["inspect", "SRC", "--json"]])
def test_commands_name_the_modules_outside(source: Path, tmp_path: Path, arguments: list[str]) -> None:
    edit_config(source, lambda config: config.pop("num_nextn_predict_layers"))
    paths = {"SRC": str(source), "DST": str(tmp_path / "dst")}
    outcome = CliRunner().invoke(app, [paths.get(argument, argument) for argument in arguments])
    assert outcome.exit_code == 2
    assert NEXTN_KV_B in outcome.output
    assert not (tmp_path / "dst").exists()


def test_kept_nextn_is_no_module_outside(source: Path, tmp_path: Path) -> None:
    plan = plan_contents(ConvertOptions(source, tmp_path / "dst", nextn="keep"))
    assert len(plan.modules) == 2


def test_wrapper_prefix_is_part_of_the_pattern(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", "kimi_k25", layers=2, shards=1)
    edit_config(source, lambda config: config["text_config"].update(num_hidden_layers=1))  # type: ignore[index]
    with pytest.raises(RecipeError, match=r"language_model\.model\.layers\.1\.self_attn\.kv_b_proj"):
        plan_contents(ConvertOptions(source, tmp_path / "dst", layout=ConvertOptions.layout))


@pytest.mark.parametrize(
    "block", [[0, 128], ["a", "b"], [None, None], [[1], [2]], [1e400, 128], [128], "128", {}, [True, True], [-1, 2]]
)
@pytest.mark.parametrize("requantize", [False, True])
def test_unusable_block_size(tmp_path: Path, block: object, requantize: bool) -> None:
    """No crash: the tensors themselves show the block, or the config is refused with its own error."""
    source = synthesize(tmp_path / "src", layers=1, shards=1, encoding="fp8_block")
    edit_config(source, lambda config: config["quantization_config"].update(weight_block_size=block))  # type: ignore[index]
    options = ConvertOptions(source, tmp_path / "dst", requantize=requantize)
    if requantize:
        with pytest.raises(WeightprepError, match="weight_block_size"):
            plan_contents(options)
    else:
        assert len(plan_contents(options).passed) == 2


@pytest.mark.parametrize(("precision", "advised"), [("fp8", False), ("mxfp4", True)])
def test_inspect_advises_a_conversion_that_convert_does(source: Path, precision: str, advised: bool) -> None:
    outcome = CliRunner().invoke(app, ["inspect", str(source), "--precision", precision])
    assert "`weightprep convert" in outcome.output
    assert ("--layout sidecar" in outcome.output) is advised


def test_inspect_mentions_a_sidecar(source: Path) -> None:
    runner = CliRunner()
    assert "sidecar" not in runner.invoke(app, ["inspect", str(source)]).output
    assert runner.invoke(app, ["convert", str(source), str(source), "--layout", "sidecar"]).exit_code == 0
    outcome = runner.invoke(app, ["inspect", str(source)])
    assert "weightprep/manifest.json" in outcome.output
    assert "`weightprep convert" not in outcome.output
    assert json.loads(runner.invoke(app, ["inspect", str(source), "--json"]).stdout)["sidecar"] is True


def test_what_is_made_while_loading_leaves_nothing_to_convert(source: Path, tmp_path: Path) -> None:
    """One stored weight has one precision; w_kc in bf16 beside w_vc in fp8 is the loader's work."""
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--precision", "bf16+fp8"]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0
    assert "nothing to convert: 3 module(s) are left in bf16: bf16+fp8 is made while loading" in outcome.stdout
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(("target", "path"), [("sm90", "bf16+fp8_absorbed"), ("gfx950", "the result is wrong")])
def test_inspect_says_where_w_vc_alone_in_fp8_is_read(source: Path, target: str, path: str) -> None:
    arguments = ["inspect", str(source), "--precision", "bf16+fp8", "--target", target, "--json"]
    outcome = CliRunner().invoke(app, arguments)
    assert path in outcome.stdout


def test_a_shard_of_scales_alone_has_no_counterpart(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=1, shards=1, encoding="fp8_block")
    tensors = load_file(source / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if "kv_b_proj.weight_scale" in name}
    names = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": tensors}
    for name in scales:
        del tensors[name]
    (source / "model.safetensors").unlink()
    for name, part in names.items():
        save_file(part, source / name)
    weight_map = {key: name for name, part in names.items() for key in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--requantize"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [path.name for path in (tmp_path / "dst").glob("*.safetensors")] == ["model-00002-of-00002.safetensors"]
    assert CliRunner().invoke(app, ["verify", str(source), str(tmp_path / "dst")]).exit_code == 0
    # the result is a checkpoint again
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "dst")]).exit_code == 0
