"""Converted checkpoints give the online path's very bytes: inline, from a sidecar, and in sglang without the plugin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import on_ranks
import pytest
import torch
from live_sglang import Absorbed
from ranks import RankFailed, Ranks
from sidecar_files import edit_sidecar
from test_prepare import assert_same_bits
from tiny_models import LAYERS, scale_kv_b
from typer.testing import CliRunner

from weightprep.cli import app


@pytest.mark.parametrize("draft", [False, True], ids=["decoder", "nextn"])
@pytest.mark.parametrize("size", ["tp1", "tp2"])
def test_sidecar_equals_online(
    size: str, draft: bool, glm: Path, sidecar: Path, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(size)
    online = ranks.run(on_ranks.load, glm, draft=draft)
    offline = ranks.run(on_ranks.load, sidecar, draft=draft)
    origins = ranks.run(on_ranks.origins, (str(sidecar), "weightprep", draft))
    for left, right, origin in zip(online, offline, origins, strict=True):
        assert_same_bits(left, right)
        assert set(origin.values()) == {"sidecar fp8_tensor"}


@pytest.mark.parametrize("draft", [False, True], ids=["decoder", "nextn"])
@pytest.mark.parametrize("size", ["tp1", "tp2"])
def test_inline_equals_online(size: str, draft: bool, glm: Path, inline: Path, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue(size)
    online = ranks.run(on_ranks.load, glm, draft=draft)
    offline = ranks.run(on_ranks.load_without_amx, inline, "weightprep", on_ranks.GFX950, draft)
    for left, right in zip(online, offline, strict=True):
        assert_same_bits(left, right)


@pytest.mark.parametrize("draft", [False, True], ids=["decoder", "nextn"])
def test_inline_needs_no_plugin(draft: bool, tp1: Ranks, glm: Path, inline: Path) -> None:
    online = tp1.run(on_ranks.load, glm, draft=draft)[0]
    plain = tp1.run(on_ranks.load_without_amx, inline, "auto", {}, draft)[0]
    assert online.keys() == plain.keys()
    for layer, absorbed in online.items():
        *weights, scale = zip(absorbed.bits, plain[layer].bits, strict=True)
        for ours, theirs in weights:
            assert torch.equal(ours, theirs)
        # That loader computes the scale again, from the amax 448 * scale. For 16 of the 128 mantissas that a bf16 amax
        # can have, the roundings of 448 * scale and of its reciprocal end one ulp away from the scale that is stored.
        assert abs(int(scale[0]) - int(scale[1])) <= 1


def test_stale_sidecar_is_refused(tp2: Ranks, glm: Path, sidecar: Path, tmp_path: Path) -> None:
    """On two ranks, of which one alone hashes the layer that differs."""
    other = scale_kv_b(glm, tmp_path / "model", 2.0, only=(1,))
    shutil.copytree(sidecar / "weightprep", other / "weightprep")
    with pytest.raises(RankFailed) as failure:
        tp2.run(on_ranks.load, other)
    for rank in ("rank 0", "rank 1"):
        assert f"{rank}: EngineError" in str(failure.value)
    assert "1 module(s) converted from other weights, first: model.layers.1.self_attn.kv_b_proj" in str(failure.value)


def test_sidecar_off_converts_while_loading(tp1: Ranks, glm: Path, sidecar: Path) -> None:
    off = tp1.run(on_ranks.load, sidecar, extra=on_ranks.GFX950 | {"sidecar": "off"})[0]
    assert_same_bits(off, tp1.run(on_ranks.load, glm)[0])
    origins = tp1.run(on_ranks.origins, (str(sidecar), "weightprep", False))[0]
    assert set(origins.values()) == {"online bf16"}


def test_named_sidecar_and_one_that_is_missing(tp1: Ranks, glm: Path, sidecar: Path, tmp_path: Path) -> None:
    extra = on_ranks.GFX950 | {"sidecar": str(sidecar / "weightprep")}
    named = tp1.run(on_ranks.load, glm, extra=extra)[0]
    assert_same_bits(named, tp1.run(on_ranks.load, sidecar)[0])
    with pytest.raises(RankFailed, match=r"EngineError: sidecar .*found no .*manifest.json"):
        tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"sidecar": str(tmp_path)})


def test_sidecar_of_another_recipe_is_refused(tp1: Ranks, sidecar: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(sidecar, other)
    path = other / "weightprep" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recipe_hash": "0" * 64}))
    with pytest.raises(RankFailed, match=r"EngineError: .*recipe glm_moe_dsa with hash 000000000000"):
        tp1.run(on_ranks.load, other)


@pytest.mark.parametrize(
    ("made_with", "served_with", "instead"),
    [
        (["--precision", "mxfp4"], {}, '{"precision": {"decoder": "mxfp4", "nextn": "fp8"}}'),
        ([], {"precision": "bf16"}, '{"precision": {"decoder": "fp8", "nextn": "fp8"}}'),
        (["--precision", "decoder=fp8,nextn=bf16"], {}, '{"precision": {"decoder": "fp8", "nextn": "bf16"}}'),
        (["--nextn", "keep"], {}, '{"nextn": "keep"}'),
        (["--precision", "mxfp4", "--nextn", "keep"], {}, '{"precision": {"decoder": "mxfp4"}, "nextn": "keep"}'),
    ],
    ids=["mxfp4", "served-bf16", "nextn-bf16", "keep", "mxfp4-keep"],
)
def test_sidecar_of_another_precision_is_refused(
    made_with: list[str], served_with: dict[str, str], instead: str, tp1: Ranks, glm: Path, tmp_path: Path
) -> None:
    """And loads with what the refusal says."""
    root = tmp_path / "model"
    converted = CliRunner().invoke(app, ["convert", str(glm), str(root), "--layout", "sidecar", *made_with])
    assert converted.exit_code == 0, converted.output
    with pytest.raises(RankFailed) as refused:
        tp1.run(on_ranks.load, root, extra=on_ranks.GFX950 | served_with)
    assert "EngineError" in str(refused.value)
    assert f"--model-loader-extra-config '{instead}'" in str(refused.value)
    extra = on_ranks.GFX950 | json.loads(instead)
    assert_same_bits(
        tp1.run(on_ranks.load, root, extra=extra)[0],
        tp1.run(on_ranks.load, root, extra=extra | {"sidecar": "off"})[0],
    )


def test_sidecar_may_hold_a_nextn_that_is_kept(tp1: Ranks, sidecar: Path) -> None:
    kept = tp1.run(on_ranks.load, sidecar, extra=on_ranks.GFX950 | {"nextn": "keep"}, draft=True)[0]
    assert kept[LAYERS].w_kc.dtype is torch.bfloat16


def flip_a_bit(tensors: dict[str, torch.Tensor]) -> None:
    """The least one of the first number of layer 0: its SQNR stays what it was."""
    name = next(name for name in tensors if "layers.0." in name and name.endswith(".weight"))
    tensors[name].view(torch.uint8)[0, 0] ^= 1


def test_one_wrong_byte_in_a_sidecar_is_seen(tp1: Ranks, glm: Path, sidecar: Path, tmp_path: Path) -> None:
    """The comparison above can fail: a sidecar is really read."""
    other = tmp_path / "model"
    shutil.copytree(sidecar, other)
    edit_sidecar(other, flip_a_bit, is_recorded=True)
    changed: Absorbed = tp1.run(on_ranks.load, other)[0][0]
    assert not torch.equal(changed.bits[0], tp1.run(on_ranks.load, glm)[0][0].bits[0])


@pytest.mark.parametrize("layer", [0, 1])
def test_a_damaged_sidecar_is_refused_on_every_rank(layer: int, tp2: Ranks, sidecar: Path, tmp_path: Path) -> None:
    """Whichever of the two ranks hashed that layer."""
    other = tmp_path / "model"
    shutil.copytree(sidecar, other)
    name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        if name in tensors:
            tensors[name].view(torch.uint8)[-1, -1] ^= 1

    edit_sidecar(other, damage, is_recorded=False)
    with pytest.raises(RankFailed) as failure:
        tp2.run(on_ranks.load, other)
    text = str(failure.value)
    assert "EngineError" in text
    assert f".safetensors: {name}: found SHA-256 " in text
    assert f"`weightprep verify {other} {other}`" in text


def test_bf16_is_upstreams_form(tp1: Ranks, glm: Path) -> None:
    asked = tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"precision": "bf16"})[0]
    assert_same_bits(asked, tp1.run(on_ranks.load, glm, "auto", {})[0])


def test_nextn_can_be_kept(tp1: Ranks, glm: Path) -> None:
    kept = tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"nextn": "keep"}, draft=True)[0]
    assert kept[LAYERS].w_kc.dtype is torch.bfloat16
    assert kept[LAYERS].w_scale == 1.0
