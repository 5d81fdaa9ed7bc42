"""What a load says and what it refuses: the table, violations, options, load formats, routes around the loader."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_ranks
import pytest
import torch
from ranks import RankFailed, Ranks
from releases import wheel
from safetensors.torch import load_file, save_file
from sidecar_files import edit_sidecar
from test_prepare import assert_same_bits
from tiny_models import LAYERS, scale_kv_b
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.engines.sglang.options import explaining_flags
from weightprep.errors import RecipeError
from weightprep.recipe import find_recipe, recipe_directories


@pytest.fixture
def wrong_layout(tmp_path: Path) -> Path:
    """The recipe of GLM with the other memory order, which breaks its own contract in every layer."""
    text = next(path for d in recipe_directories() if (path := d / "glm_moe_dsa.yaml").is_file()).read_text()
    assert "w_kc: nk_contiguous" in text
    recipe = tmp_path / "wrong_layout.yaml"
    recipe.write_text(
        text.replace("w_kc: nk_contiguous", "w_kc: kn_contiguous").replace("name: glm_moe_dsa", "name: wrong_layout")
    )
    return recipe


def scale_of_layer(layer: int, model: Path, factor: float) -> None:
    """Multiply the scales that the sidecar of `model` has for a layer, as a conversion with a fault would."""

    def scale(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if f"layers.{layer}." in name and name.endswith("scale"):
                tensors[name] = tensors[name] * factor

    edit_sidecar(model, scale, is_recorded=True)


def break_layer_1(model: Path, suffix: str) -> None:
    """Make the first number of layer 1's tensor in the checkpoint `model` so large that all others lose their bits."""
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith(f"layers.1.self_attn.{suffix}"):
                tensors[name].view(-1)[0] = 1e6
        save_file(tensors, file)


def test_table_and_json(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    report, log = tp1.run(on_ranks.report_and_log, glm, tmp_path)[0]
    assert report["schema"] == "weightprep.startup/1"
    assert (report["target"], report["recipe"]) == ("gfx950", "glm_moe_dsa")
    assert [layer["layer"] for layer in report["layers"]] == list(range(LAYERS))
    for layer in report["layers"]:
        assert (layer["path"], layer["fast"], layer["source"]) == ("fp8_absorbed", True, "online bf16")
    (table,) = [message for message in log if "recipe glm_moe_dsa" in message]
    assert f"decoder  {LAYERS}/{LAYERS}" in table
    assert any("canary passed for 1 distinct kernel path" in message for message in log)


@pytest.mark.parametrize("nextn", ["convert", "keep"])
def test_a_draft_reports_in_a_file_of_its_own(nextn: str, tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    report, log = tp1.run(on_ranks.report_and_log, glm, tmp_path, {"nextn": nextn}, draft=True)[0]
    assert report["file"] == "report.nextn.json"
    (layer,) = report["layers"]
    wanted = ("fp8", "fp8_absorbed", True) if nextn == "convert" else ("kept", "bf16", False)
    assert (layer["precision"], layer["path"], layer["fast"]) == wanted
    assert (layer["layer"], layer["group"]) == (LAYERS, "nextn")
    (table,) = [message for message in log if "recipe glm_moe_dsa" in message]
    row = table.splitlines()[-1]
    if nextn == "keep":
        assert row.endswith("slow: nextn is keep; w_kc is bfloat16: torch.bmm")
        assert "exact" not in row
    assert row.split()[:3] == ["nextn", "1/1", wanted[0]]
    assert sum("canary" in message for message in log) == (nextn == "convert")


def test_violations_are_raised_together(tp1: Ranks, glm: Path, wrong_layout: Path) -> None:
    with pytest.raises(RankFailed) as failure:
        tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"recipe": str(wrong_layout)})
    text = str(failure.value)
    assert f"ModelContractError: {LAYERS} contract violations" in text
    for layer in range(LAYERS):
        assert f"layer {layer} (decoder) self_attn.w_kc: strides are" in text


def test_violations_of_an_update_are_raised(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    """Of one from disk too, which is no startup; those of a model that warns are not."""
    broken = tmp_path / "broken"
    shutil.copytree(glm, broken)
    break_layer_1(broken, "kv_b_proj.weight")
    key = (str(glm), "weightprep", False)
    tp1.run(on_ranks.load, glm)
    with pytest.raises(RankFailed, match=r"ModelContractError: 1 contract violation.*\n.*layer 1 .*SQNR is"):
        tp1.run(on_ranks.update_from_disk, key, broken)
    tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"on_violation": "warn"})
    assert tp1.run(on_ranks.update_from_disk, key, broken)[0][0]


def violations_beside_a_linear_on_another_device(state: Any, key: tuple[str, str, bool]) -> list[str]:
    """Of a kept model whose kv_b_proj of layer 1 is elsewhere than what was made of it."""
    from weightprep.contracts import predict
    from weightprep.engines.sglang.layer_violations import find_violations
    from weightprep.engines.sglang.modules import live_modules
    from weightprep.engines.sglang.post_load import preparation_of

    ((holder, preparation),) = preparation_of(state.models[key])
    module = live_modules(holder, preparation.plan)[1]
    prediction = predict("gfx950", "0.5.23", {"w_kc": "float8_e4m3fn", "w_vc": "float8_e4m3fn", "w_scale": "tensor"})
    assert find_violations(module, prediction, preparation) == []
    kept = module.linear.weight
    module.linear.weight = torch.nn.Parameter(kept.to("meta"), requires_grad=False)
    try:
        return [str(violation) for violation in find_violations(module, prediction, preparation)]
    finally:
        module.linear.weight = kept


def test_tensors_on_another_device_than_their_linear_are_violations(tp1: Ranks, glm: Path) -> None:
    tp1.run(on_ranks.load, glm)
    found = tp1.run(violations_beside_a_linear_on_another_device, (str(glm), "weightprep", False))[0]
    for violation, role in zip(found, ("w_kc", "w_vc", "w_scale"), strict=True):
        assert f"self_attn.{role}: is on cpu" in violation
        assert "meta" in violation


def test_warn_keeps_serving_and_says_each_cause_once(tp1: Ranks, glm: Path, wrong_layout: Path, tmp_path: Path) -> None:
    extra = {"recipe": str(wrong_layout), "on_violation": "warn"}
    report, log = tp1.run(on_ranks.report_and_log, glm, tmp_path, extra)[0]
    assert len(report["layers"]) == LAYERS
    (warning,) = [message for message in log if "strides are" in message]
    assert f"(and {LAYERS - 1} more layers)" in warning
    assert f"weightprep: no canary for {LAYERS} layer(s) that violate their contract" in log
    assert not any("canary passed" in message for message in log)


def test_warn_says_the_worst_of_a_kind_that_differs_in_its_figure(
    tp1: Ranks, glm: Path, tmp_path: Path, sidecar_of: Callable[[Path, Path], Path]
) -> None:
    model = sidecar_of(glm, tmp_path / "model")
    for layer, factor in enumerate((1.5, 3.0, 2.0)):
        scale_of_layer(layer, model, factor)
    report, log = tp1.run(on_ranks.report_and_log, model, tmp_path, {"on_violation": "warn"})[0]
    assert len({violation["found"] for violation in report["violations"]}) == LAYERS
    (warning,) = [message for message in log if "SQNR is" in message]
    # noise of twice the signal, in layer 1: -6 dB
    assert warning.startswith("weightprep: layer 1 (decoder) self_attn.w_kc and w_vc: SQNR is -6.0 dB")
    assert warning.endswith(f"(and {LAYERS - 1} more layers, none worse)")


def test_a_path_is_logged_when_it_is_first_taken(tp1: Ranks, glm: Path) -> None:
    """By operation and kind of layer, each once; the canary's calls are none of the model's."""
    log = tp1.run(on_ranks.log_of_first_calls, glm)[0]
    said = [message for message in log if "taken" in message or "left to" in message]
    assert said == [
        "weightprep: taken: rocm_absorb_q_bmm absorb/torch/fp8/bf16 (decoder)",
        "weightprep: taken: rocm_absorb_v_bmm absorb/torch/fp8/bf16 (decoder)",
        "weightprep: left to sglang: rocm_absorb_q_bmm: with this many rows upstream's fp8 kernel is the faster one",
        "weightprep: taken: rocm_absorb_q_bmm absorb/torch/fp8/bf16 (nextn)",
        "weightprep: taken: rocm_absorb_v_bmm absorb/torch/fp8/bf16 (nextn)",
    ]
    assert sum("canary passed" in message for message in log) == 2


def test_a_violation_that_is_served_is_in_the_json(
    tp1: Ranks, glm: Path, sidecar: Path, wrong_layout: Path, tmp_path: Path
) -> None:
    extra = {"recipe": str(wrong_layout), "on_violation": "warn"}
    report, _ = tp1.run(on_ranks.report_and_log, glm, tmp_path, extra)[0]
    assert [(v["layer"], v["group"]) for v in report["violations"]] == [(layer, "decoder") for layer in range(LAYERS)]
    for violation in report["violations"]:
        assert violation["tensor"] == "self_attn.w_kc"
        assert violation["found"].startswith("strides are")
        assert violation["wanted"].startswith("strides (")
        assert "recipe wrong_layout" in violation["remedy"]
    assert report["canary"] == {"state": "not run", "paths": [], "left_out": LAYERS}
    assert report["runtime"]["asked"] == "auto"
    assert report["runtime"]["hooks"] == []
    sound, log = tp1.run(on_ranks.report_and_log, sidecar, tmp_path)[0]
    assert sound["violations"] == []
    assert sound["canary"] == {"state": "passed", "paths": ["fp8_absorbed"], "left_out": 0}
    assert "weightprep: absorbed products as sglang's own: no GPU, whose functions are the ones that are hooked" in log


def test_the_json_of_a_server_that_was_stopped_has_the_violations(
    tp1: Ranks, glm: Path, wrong_layout: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match="ModelContractError"):
        tp1.run(on_ranks.report, glm, tmp_path, {"recipe": str(wrong_layout)})
    report = json.loads((tmp_path / "rank0" / "report.json").read_text())
    assert len(report["violations"]) == LAYERS


def test_a_canary_that_is_off_is_told(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    report, log = tp1.run(on_ranks.report_and_log, glm, tmp_path, {"canary": "off"})[0]
    assert report["canary"] == {"state": "off", "paths": [], "left_out": 0}
    assert not any("canary" in message for message in log)


def test_a_scale_of_nan_is_not_exact(tp1: Ranks, sidecar: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(sidecar, model)
    scale_of_layer(1, model, float("nan"))
    report, log = tp1.run(on_ranks.report_and_log, model, tmp_path, {"on_violation": "warn"})[0]
    assert [layer["noise"] for layer in report["layers"]] == ["finite", "not finite", "finite"]
    assert [layer["sqnr_db"] is None for layer in report["layers"]] == [False, True, False]
    (table,) = [message for message in log if message.startswith("weightprep: GlmMoeDsaForCausalLM on gfx950")]
    assert "  not finite  " in table
    assert " dB" not in table
    assert {violation["layer"] for violation in report["violations"]} == {1}


def test_the_remedy_of_wrong_values_finds_them(
    tp1: Ranks, glm: Path, sidecar: Path, inline: Path, tmp_path: Path
) -> None:
    """It follows from where the weights came from."""
    beside, within, online = (tmp_path / name for name in ("beside", "within", "online"))
    for source, model in ((sidecar, beside), (inline, within), (glm, online)):
        shutil.copytree(source, model)
    scale_of_layer(1, beside, float("nan"))
    for model, suffix in ((within, "kv_b_proj.weight_scale_inv"), (online, "kv_b_proj.weight")):
        break_layer_1(model, suffix)
    wanted = {
        beside: f"`weightprep verify {beside} {beside}`",
        within: f"`weightprep verify SOURCE {within}`",
        online: "download them again",
    }
    for model, remedy in wanted.items():
        folder = tmp_path / f"report of {model.name}"
        folder.mkdir()
        report = tp1.run(on_ranks.report, model, folder, {"on_violation": "warn"})[0]
        assert report["violations"]
        for violation in report["violations"]:
            assert remedy in violation["remedy"]
            assert "weightprep inspect" not in violation["remedy"]


def test_layers_without_a_violation_have_their_canary(
    tp1: Ranks, glm: Path, tmp_path: Path, sidecar_of: Callable[[Path, Path], Path]
) -> None:
    model = sidecar_of(glm, tmp_path / "model")
    scale_of_layer(1, model, 1.5)
    _, log = tp1.run(on_ranks.report_and_log, model, tmp_path, {"on_violation": "warn"})[0]
    assert "weightprep: no canary for 1 layer(s) that violate their contract" in log
    assert "weightprep: canary passed for 1 distinct kernel path(s)" in log


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"precison": "fp8"}, "EngineError: --model-loader-extra-config: precison: .* wanted 'precision', perhaps"),
        ({"on_violations": "warn"}, "wanted 'on_violation', perhaps"),
        ({"target": "gfx90a"}, "EngineError: --model-loader-extra-config: target: found 'gfx90a'"),
        (
            {"nonsense": 1},
            "EngineError: --model-loader-extra-config: nonsense: found no key of weightprep, and the inner loader's "
            "answer: Unexpected extra config keys .*'nonsense'.* loader for 'auto'.*\n  -> weightprep's keys are ",
        ),
        (
            {"nonsense": 1, "inner": "sharded_state"},
            "EngineError: --model-loader-extra-config: nonsense: .*'nonsense'.* loader for 'sharded_state'",
        ),
        ({"inner": "gguf"}, "EngineError: inner load format 'gguf'"),
        ({"precision": "int3"}, "RecipeError: precision int3"),
        (
            {"precision": "mxfp4", "target": "sm90"},
            "RecipeError: precision mxfp4 on sm90.*\n  -> choose another --model-loader-extra-config "
            """'{"precision": "..."}'; """,
        ),
    ],
    ids=["misspelt", "plural", "value", "inner's", "sharded's", "format", "precision", "sound"],
)
def test_keys(extra: dict[str, Any], message: str, tp1: Ranks, glm: Path) -> None:
    with pytest.raises(RankFailed, match=message):
        tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | extra)


def test_another_runtime_than_the_processs_is_refused_before_weights_are_read(
    tp1: Ranks, glm: Path, tmp_path: Path
) -> None:
    """Before: there are no weights to read."""
    model = tmp_path / "model"
    shutil.copytree(glm, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(RankFailed, match=r"EngineError: runtime 'torch': found .* loaded with runtime 'triton'"):
        tp1.run(on_ranks.load_beside_another_runtime, model, "triton", "torch")
    with pytest.raises(RankFailed, match="'aiter', which is not installed here"):
        tp1.run(on_ranks.load, model, extra=on_ranks.GFX950 | {"runtime": "aiter"})
    with pytest.raises(RankFailed, match="Cannot find any model weights"):
        tp1.run(on_ranks.load_beside_another_runtime, model, "torch", "torch")


def test_a_server_names_a_recipe_by_key() -> None:
    with pytest.raises(RecipeError) as refused, explaining_flags():
        find_recipe("GlmMoeDsaForCausaLM")
    assert refused.value.remedy.startswith("did you mean 'GlmMoeDsaForCausalLM'? ")
    assert """pass --model-loader-extra-config '{"recipe": "my_mla.yaml"}' (""" in refused.value.remedy


def test_keys_of_the_inner_loader_reach_it(tp1: Ranks, glm: Path) -> None:
    asked = on_ranks.GFX950 | {"inner": "safetensors", "enable_multithread_load": False}
    assert_same_bits(tp1.run(on_ranks.load, glm, extra=asked)[0], tp1.run(on_ranks.load, glm)[0])


def test_dummy_weights_are_prepared(tp1: Ranks, glm: Path) -> None:
    for absorbed in tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"inner": "dummy"})[0].values():
        assert absorbed.w_kc.dtype is torch.float8_e4m3fn
        assert float(absorbed.w_scale) > 0


def test_zero_weights_have_scale_one(tp1: Ranks, glm: Path) -> None:
    tp1.run(on_ranks.load, glm)
    for absorbed in tp1.run(on_ranks.zero_kv_b, (str(glm), "weightprep", False))[0].values():
        assert float(absorbed.w_scale) == 1.0
        assert not absorbed.w_kc.float().any()


@pytest.mark.parametrize("precision", ["fp8", "mxfp4", "bf16"])
def test_zero_dummies_are_served_with_one_warning(precision: str, tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    report, log = tp1.run(on_ranks.report_of_dummies, glm, tmp_path, precision, 0.0)[0]
    assert len(report["layers"]) == LAYERS
    (warning,) = [message for message in log if "all zeros" in message]
    assert warning == f"weightprep: kv_b_proj of layer 0 and {LAYERS - 1} more is all zeros"


@pytest.mark.parametrize(
    ("precision", "value"), [("fp8", float("nan")), ("fp8", float("inf")), ("mxfp4", float("nan"))], ids=str
)
def test_dummies_that_are_no_numbers_are_served_as_zeros(
    precision: str, value: float, tp1: Ranks, glm: Path, tmp_path: Path
) -> None:
    report, log = tp1.run(on_ranks.report_of_dummies, glm, tmp_path, precision, value)[0]
    assert report["violations"] == []
    assert len(report["layers"]) == LAYERS
    (warning,) = [message for message in log if "no numbers" in message]
    assert warning == (
        f"weightprep: model.layers.0.self_attn.kv_b_proj and {LAYERS - 1} more: made-up weights that are no numbers, "
        "converted as 0 and their scales as 1"
    )


def test_an_update_of_a_dummy_load_is_not_made_up(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    """As a trainer does, which starts a server so and sends it the weights."""
    tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"inner": "dummy"})
    broken = scale_kv_b(glm, tmp_path / "broken", float("nan"))
    done, message, _ = tp1.run(on_ranks.try_update, (str(glm), "weightprep", False), broken, "tensor")[0]
    assert not done
    assert "a NaN or an infinity in the weight" in message


@pytest.mark.parametrize("precision", ["fp8", "mxfp4", "bf16", "bf16+fp8"])
def test_quality_is_reported(precision: str, tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    # gfx950 has no kernel that reads a scale for one of the two
    target = "sm90" if precision == "bf16+fp8" else "gfx950"
    asked = {"precision": precision, "canary": "off", "target": target}
    report, log = tp1.run(on_ranks.report_and_log, glm, tmp_path, asked)[0]
    # normal data: relative error 0.0265 in e4m3 and 0.11 to 0.12 in MXFP4; 20 log10 of it, half a dB to either side;
    # where only w_vc is fp8, 256 of a head's 448 rows, 10 log10(448 / 256) = 2.4 dB more than in fp8
    ranges = {"fp8": (31.0, 32.1), "mxfp4": (17.9, 19.7), "bf16": (None, None), "bf16+fp8": (33.4, 34.5)}
    lowest, highest = ranges[precision]
    for layer in report["layers"]:
        found = layer["sqnr_db"]
        assert found is lowest if lowest is None else lowest < found < highest
    assert any(("exact" if lowest is None else " dB  ") in message for message in log)


def test_a_scale_that_is_not_the_weights_is_a_violation(
    tp2: Ranks, glm: Path, tmp_path: Path, sidecar_of: Callable[[Path, Path], Path]
) -> None:
    """dtype, shape, strides and range of everything are right."""
    model = sidecar_of(glm, tmp_path / "model")
    scale_of_layer(1, model, 1.5)
    with pytest.raises(RankFailed) as failure:
        tp2.run(on_ranks.load, model)
    # noise is half of the signal: 20 log10(2) = 6.02 dB
    assert "layer 1 (decoder) self_attn.w_kc and w_vc: SQNR is 6.0 dB against kv_b_proj" in str(failure.value)
    assert "1 contract violation" in str(failure.value)


@pytest.mark.parametrize("precision", ["fp8", "bf16", "mxfp4"])
def test_weights_of_another_layer_are_a_violation(precision: str, tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    """Two random weights of one size: the noise is twice the signal, -3 dB, and less for the worst of some heads."""
    source, model = tmp_path / "source", tmp_path / "model"
    shutil.copytree(glm, source)
    for file in source.glob("*.safetensors"):
        # bf16 of bf16 would be nothing to convert
        tensors = load_file(file)
        save_file({k: t.float() if "kv_b_proj" in k else t for k, t in tensors.items()}, file)
    arguments = ["convert", str(source), str(model), "--layout", "sidecar", "--precision", precision]
    converted = CliRunner().invoke(app, arguments)
    assert converted.exit_code == 0, converted.stderr

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if ".layers.1." in name:
                tensors[name] = tensors[name.replace(".layers.1.", ".layers.0.")].clone()

    extra = on_ranks.GFX950 | {"precision": precision}
    tp1.run(on_ranks.load, model, extra=extra)
    edit_sidecar(model, swap, is_recorded=True)
    with pytest.raises(RankFailed, match=r"layer 1 \(decoder\) self_attn\.w_kc and w_vc: SQNR is -[34]\.\d dB"):
        tp1.run(on_ranks.load, model, extra=extra)


@pytest.mark.parametrize("inner", ["fastsafetensors", "instanttensor"])
def test_formats_that_read_into_gpu_memory_are_refused_without_one(inner: str, tp1: Ranks, glm: Path) -> None:
    with pytest.raises(RankFailed, match=f"EngineError: inner load format '{inner}': found a machine without a GPU"):
        tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"inner": inner})


def test_runai_streamer(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    wheels = [str(wheel(requirement)) for requirement in ("runai-model-streamer", "humanize")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(tmp_path), *wheels], check=True)
    streamed = tp1.run(on_ranks.load_through, glm, "runai_streamer", tmp_path)[0]
    assert_same_bits(streamed, tp1.run(on_ranks.load, glm)[0])


def test_sharded_state_round_trip(tp2: Ranks, glm: Path, tmp_path: Path) -> None:
    online = tp2.run(on_ranks.load, glm)
    for names in tp2.run(on_ranks.save_sharded, (str(glm), "weightprep", False), tmp_path / "sharded"):
        assert not [name for name in names if "w_kc" in name or "w_vc" in name or "w_scale" in name]
    extra = on_ranks.GFX950 | {"inner": "sharded_state"}
    for left, right in zip(online, tp2.run(on_ranks.load, tmp_path / "sharded", extra=extra), strict=True):
        assert_same_bits(left, right)


def test_weight_cache_is_refused(tp1: Ranks) -> None:
    with pytest.raises(RankFailed, match="EngineError: --weight-cache-mode client: found the weight cache"):
        tp1.run(on_ranks.build_load_config, weight_cache_mode="client")


def test_without_the_flag_nothing_is_hooked_that_loads(tp1: Ranks, glm: Path) -> None:
    """The same process has loaded with the flag before: a plain load must not notice."""
    tp1.run(on_ranks.load, glm)
    plain = tp1.run(on_ranks.load, glm, "auto", {})[0]
    for absorbed in plain.values():
        assert absorbed.w_kc.dtype is torch.bfloat16
        assert absorbed.w_scale == 1.0


@pytest.mark.parametrize("corrected", [True, False], ids=["with correction", "without"])
def test_lora_that_would_be_ignored_is_warned_about(
    corrected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from types import SimpleNamespace

    from weightprep.engines.sglang import lora, versions

    if not corrected:
        monkeypatch.setattr(lora, "LORA_CORRECTION", versions.Target("correction", ("sglang.srt.lora.lost",)))
    lora.warn_if_lora_is_ignored(SimpleNamespace(enable_lora=False, lora_paths=None))
    assert caplog.messages == []
    lora.warn_if_lora_is_ignored(SimpleNamespace(enable_lora=True, lora_paths=None))
    assert any("NO EFFECT" in message for message in caplog.messages) is not corrected


def test_weights_under_a_lora_wrapper_are_prepared_and_the_wrapper_stays(tp1: Ranks, glm: Path) -> None:
    tp1.run(on_ranks.load, glm)
    active, (before, after) = tp1.run(on_ranks.update_under_lora, (str(glm), "weightprep", False), 1)[0]
    assert active
    assert float(after) == 2 * float(before)


def start_with_bmm_fp8(state: Any, runtime: str) -> tuple[dict[str, Any], list[str]]:
    """What a start says where sglang has bound CUDA's kernel, which it does not without a GPU."""
    from dataclasses import asdict
    from unittest.mock import patch

    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    from weightprep.engines.sglang import runtime_check, runtime_hooks

    kept = runtime_hooks._runtime, runtime_hooks._backend
    try:
        with (
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(forward_mla, "bmm_fp8", lambda *args: None, create=True),
            on_ranks.logged() as messages,
        ):
            return asdict(runtime_check.start_runtime(runtime)), messages
    finally:
        runtime_hooks._runtime, runtime_hooks._backend = kept


def test_whose_absorbed_products_run_is_told(tp1: Ranks) -> None:
    report, log = tp1.run(start_with_bmm_fp8, "upstream")[0]
    assert (report["asked"], report["hooks"]) == ("upstream", ())
    assert log == ["weightprep: absorbed products as sglang's own: the option runtime is upstream"]
    report, log = tp1.run(start_with_bmm_fp8, "triton")[0]
    (hook,) = report["hooks"]
    assert hook.endswith(".forward_mla.bmm_fp8")
    assert log == ["weightprep: absorbed V batch-major by weightprep, runtime triton: hooks on bmm_fp8"]
