"""Weight updates into a running model, by every route of sglang: in place, and as good as a fresh load, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_ranks
import pytest
import torch
from live_sglang import Absorbed
from ranks import RankFailed, Ranks
from safetensors.torch import load_file, save_file
from test_prepare import assert_same_bits
from tiny_models import LAYERS, scale_kv_b

ALL = tuple(range(LAYERS))


@pytest.fixture(scope="module")
def other(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scale_kv_b(glm, tmp_path_factory.mktemp("other") / "model", 3.0)


@pytest.fixture(scope="module")
def wanted(tp1: Ranks, other: Path) -> dict[int, Absorbed]:
    return tp1.run(on_ranks.load, other)[0]


def assert_followed(
    after: dict[int, Absorbed], before: dict[int, Absorbed], wanted: dict[int, Absorbed], layers: tuple[int, ...]
) -> None:
    expected = {layer: wanted[layer] if layer in layers else before[layer] for layer in before}
    assert_same_bits(after, expected)
    for layer in after:
        assert after[layer].pointers == before[layer].pointers


@pytest.mark.parametrize("layers", [ALL, (1,)], ids=["all", "one layer"])
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_from_tensor(
    layers: tuple[int, ...], load_format: str | None, tp1: Ranks, glm: Path, other: Path, wanted: dict[int, Absorbed]
) -> None:
    before = tp1.run(on_ranks.load, glm)[0]
    key = (str(glm), "weightprep", False)
    for _ in range(2):
        after = tp1.run(on_ranks.update_from_tensors, key, other, layers, load_format)[0]
        assert_followed(after, before, wanted, layers)


def test_direct_copies_are_followed(tp1: Ranks, glm: Path, other: Path, wanted: dict[int, Absorbed]) -> None:
    before = tp1.run(on_ranks.load, glm)[0]
    after = tp1.run(on_ranks.update_from_tensors, (str(glm), "weightprep", False), other, (0, 2), "direct")[0]
    assert_followed(after, before, wanted, (0, 2))


def test_mxfp4_keeps_the_storage_of_its_scales_too(tp1: Ranks, glm: Path, other: Path) -> None:
    before, after, held = tp1.run(on_ranks.update_of_mxfp4, glm, other)[0]
    _, _, fresh = tp1.run(on_ranks.update_of_mxfp4, other, other)[0]
    assert after == before
    for layer, tensors in held.items():
        for mine, wanted in zip(tensors, fresh[layer], strict=True):
            assert torch.equal(mine, wanted)
    _, _, unchanged = tp1.run(on_ranks.update_of_mxfp4, glm, glm)[0]
    assert not torch.equal(held[0][2], unchanged[0][2])


def test_from_distributed(tp1: Ranks, glm: Path, other: Path, wanted: dict[int, Absorbed]) -> None:
    before = tp1.run(on_ranks.load, glm)[0]
    after = tp1.run(on_ranks.update_from_distributed, (str(glm), "weightprep", False), other, ALL)[0]
    assert_followed(after, before, wanted, ALL)


def test_from_disk_in_another_load_format(tp1: Ranks, glm: Path, other: Path, wanted: dict[int, Absorbed]) -> None:
    before = tp1.run(on_ranks.load, glm)[0]
    done, message, after = tp1.run(on_ranks.update_from_disk, (str(glm), "weightprep", False), other, "auto")[0]
    assert done, message
    assert_followed(after, before, wanted, ALL)


@pytest.mark.parametrize("draft", [False, True], ids=["decoder", "nextn"])
@pytest.mark.parametrize("is_sidecar", [False, True], ids=["online", "sidecar"])
def test_a_silent_copy_on_one_rank_is_detected(
    is_sidecar: bool, draft: bool, tp2: Ranks, glm: Path, tmp_path: Path, sidecar_of: Callable[[Path, Path], Path]
) -> None:
    """On all ranks where it changes the scale that they share, else on the one that holds the rows."""
    layer = LAYERS if draft else 1
    model = sidecar_of(glm, tmp_path / "model") if is_sidecar else glm
    for factor, on_both in ((4.0, True), (0.25, False)):
        tp2.run(on_ranks.load, model, draft=draft)
        key = (str(model), "weightprep", draft)
        # the rank that does not hold the largest value keeps the scale when its rows become smaller
        amax = tp2.run(on_ranks.largest_in_kv_b, key, layer)
        rank = amax.index(min(amax))
        found = tp2.run(on_ranks.copy_behind_everybodys_back, key, layer, factor, rank)
        assert [before for before, _ in found] == [[], []]
        stale = [f"model.layers.{layer}.self_attn.kv_b_proj"]
        assert [after for _, after in found] == [stale if on_both or other == rank else [] for other in range(2)]


@pytest.mark.parametrize("draft", [False, True], ids=["decoder", "nextn"])
def test_an_update_of_the_base_of_a_sidecar_is_refused_and_detected(
    draft: bool, tp2: Ranks, glm: Path, tmp_path: Path, sidecar_of: Callable[[Path, Path], Path]
) -> None:
    """What is bound stays what it was, and the layer whose base changed on disk is named on both ranks."""
    layer = LAYERS if draft else 1
    model = sidecar_of(glm, tmp_path / "model")
    before = tp2.run(on_ranks.load, model, draft=draft)
    key = (str(model), "weightprep", draft)
    other = scale_kv_b(glm, tmp_path / "other", 2.0, only=(layer,))
    # not into the file, which is linked to the one that was converted
    (other / "model.safetensors").replace(model / "model.safetensors")
    with pytest.raises(RankFailed) as refused:
        tp2.run(on_ranks.update_from_disk, key, model)
    module = f"model.layers.{layer}.self_attn.kv_b_proj"
    assert f"1 module(s) converted from other weights, first: {module}" in str(refused.value)
    for after, kept in zip(tp2.run(on_ranks.absorbed_now, key), before, strict=True):
        assert_followed(after, kept, kept, ())
    assert tp2.run(on_ranks.stale, key) == [[module], [module]]


def test_an_update_of_some_layers_leaves_the_others_their_sidecar(
    tp2: Ranks, glm: Path, other: Path, tmp_path: Path, sidecar_of: Callable[[Path, Path], Path]
) -> None:
    model = sidecar_of(glm, tmp_path / "model")
    before, fresh = tp2.run(on_ranks.load, model), tp2.run(on_ranks.load, other)
    key = (str(model), "weightprep", False)
    name = "model.layers.1.self_attn.kv_b_proj"
    some = tmp_path / "some"
    shutil.copytree(other, some)
    tensor = load_file(other / "model.safetensors")[f"{name}.weight"]
    save_file({f"{name}.weight": tensor}, some / "model.safetensors", metadata={"format": "pt"})
    updates = tp2.run(on_ranks.update_from_disk, key, some)
    for (done, message, after), kept, wanted in zip(updates, before, fresh, strict=True):
        assert done, message
        assert_followed(after, kept, wanted, (1,))
    assert tp2.run(on_ranks.stale, key) == [[], []]
    for origins in tp2.run(on_ranks.origins, key):
        assert {module for module, origin in origins.items() if origin == "online bf16"} == {name}


def test_disk_update_with_the_plans_options(tp1: Ranks, glm: Path, other: Path) -> None:
    """sglang rebuilds the load config of such an update without our keys; what was asked for still counts."""
    extra = on_ranks.GFX950 | {"nextn": "keep"}
    kept = tp1.run(on_ranks.load, glm, extra=extra, draft=True)[0]
    done, message, after = tp1.run(on_ranks.update_from_disk, (str(glm), "weightprep", True), other)[0]
    assert done, message
    assert kept[LAYERS].w_kc.dtype == after[LAYERS].w_kc.dtype
    assert float(after[LAYERS].w_kc.float().abs().max()) > 2 * float(kept[LAYERS].w_kc.float().abs().max())


def test_weight_and_scale_in_different_calls(
    tp1: Ranks, glm: Path, other: Path, tmp_path: Path, inline_of: Callable[[Path, Path], Path]
) -> None:
    first, second = inline_of(glm, tmp_path / "first"), inline_of(other, tmp_path / "second")
    key = (str(first), "weightprep", False)
    before = tp1.run(on_ranks.load_without_amx, first, "weightprep", on_ranks.GFX950, keep=True)[0]
    wanted = tp1.run(on_ranks.load_without_amx, second, "weightprep", on_ranks.GFX950)[0]
    calls: Any = (("weight",), ("weight_scale_inv",))
    for _ in range(2):
        after = tp1.run(on_ranks.update_from_tensors, key, second, (0, 1), calls=calls)[0]
        assert_followed(after, before, wanted, (0, 1))
