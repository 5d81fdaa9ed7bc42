"""What an update may not bring: by every route, and from one rank to the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import on_ranks
import pytest
import torch
from live_sglang import Absorbed
from ranks import RankFailed, Ranks
from safetensors.torch import load_file, save_file
from test_prepare import assert_same_bits
from tiny_models import HEADS, LAYERS, NOPE, RANK, V, scale_kv_b

ROUTES = ("tensor", "flattened_bucket", "direct", "distributed")
TENSOR_ROUTES = ROUTES[:3]


def edit_layer_1(source: Path, out: Path, edit: Callable[[torch.Tensor], object]) -> Path:
    """A copy of a checkpoint; `edit` gets the kv_b_proj of layer 1 as [heads, nope + v, rank]."""
    scale_kv_b(source, out, 1.0)
    tensors = load_file(out / "model.safetensors")
    edit(tensors["model.layers.1.self_attn.kv_b_proj.weight"].view(HEADS, NOPE + V, RANK))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def spoil(weight: torch.Tensor) -> None:
    weight[-1, -1] = float("nan")


@pytest.fixture(scope="module")
def small_head(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Under the scale of the whole tensor a head of layer 1 is lost; at two ranks the second one has it."""
    return edit_layer_1(glm, tmp_path_factory.mktemp("small") / "model", lambda weight: weight[-2].mul_(2**-16))


@pytest.fixture(scope="module")
def nan_in_last_row(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edit_layer_1(
        glm, tmp_path_factory.mktemp("nan") / "model", lambda weight: weight[-1, -1].fill_(float("nan"))
    )


def refusal(tp1: Ranks, glm: Path, path: Path, route: str) -> str:
    """What the request is answered that updates a sound model from `path`."""
    tp1.run(on_ranks.load, glm)
    done, message, _ = tp1.run(on_ranks.try_update, (str(glm), "weightprep", False), path, route)[0]
    assert not done
    return str(message)


@pytest.mark.parametrize("route", ROUTES)
def test_a_broken_contract_is_the_answer_of_the_request(route: str, tp1: Ranks, glm: Path, small_head: Path) -> None:
    message = refusal(tp1, glm, small_head, route)
    assert "1 contract violation\nlayer 1 (decoder) self_attn.w_kc and w_vc: SQNR is " in message
    assert "updated in part" in message or "partially updated" in message


@pytest.mark.parametrize("route", ROUTES)
def test_where_violations_are_only_warned_of_an_update_is_served(
    route: str, tp1: Ranks, glm: Path, small_head: Path
) -> None:
    tp1.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"on_violation": "warn"})
    done, message, log = tp1.run(on_ranks.try_update, (str(glm), "weightprep", False), small_head, route)[0]
    assert done, message
    # sglang calls post_load_weights once more at the end of some sessions
    assert sum("layer 1 (decoder) self_attn.w_kc and w_vc: SQNR is " in line for line in log) == 1


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_is_the_answer_of_the_request(route: str, tp1: Ranks, glm: Path, nan_in_last_row: Path) -> None:
    message = refusal(tp1, glm, nan_in_last_row, route)
    assert "model.layers.1.self_attn.kv_b_proj" in message
    assert "a NaN or an infinity" in message


def test_sound_weights_after_broken_ones_are_served(tp1: Ranks, glm: Path, small_head: Path, tmp_path: Path) -> None:
    sound = scale_kv_b(glm, tmp_path / "sound", 2.0)
    wanted: dict[int, Absorbed] = tp1.run(on_ranks.load, sound)[0]
    tp1.run(on_ranks.load, glm)
    key = (str(glm), "weightprep", False)
    assert not tp1.run(on_ranks.try_update, key, small_head, "tensor")[0][0]
    done, message, _ = tp1.run(on_ranks.try_update, key, sound, "tensor")[0]
    assert done, message
    assert_same_bits(tp1.run(on_ranks.absorbed_now, key)[0], wanted)


@pytest.mark.parametrize("route", ["tensor", "distributed"])
def test_what_one_rank_finds_all_ranks_refuse(route: str, tp2: Ranks, glm: Path, small_head: Path) -> None:
    tp2.run(on_ranks.load, glm)
    first, second = tp2.run(on_ranks.try_update, (str(glm), "weightprep", False), small_head, route)
    assert (first[0], second[0]) == (False, False)
    assert "self_attn.w_kc and w_vc: broken on tensor parallel rank 1, sound on this one" in first[1]
    assert "the log of tensor parallel rank 1 says" in first[1]
    assert "self_attn.w_kc and w_vc: SQNR is " in second[1]


@pytest.mark.parametrize(
    ("precision", "told", "found"),
    [
        # learnt with the scale that the ranks share
        ("fp8", "a NaN or an infinity", "a NaN or an infinity"),
        ("mxfp4", "another tensor parallel rank could not prepare", "a NaN or an infinity"),
        # nothing to convert, so the contract is the first that sees it
        ("bf16", "broken on tensor parallel rank 1", "a value is NaN or infinite"),
    ],
)
def test_what_one_rank_cannot_use_all_ranks_refuse(
    precision: str, told: str, found: str, tp2: Ranks, glm: Path, nan_in_last_row: Path
) -> None:
    tp2.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"precision": precision})
    key = (str(glm), "weightprep", False)
    first, second = tp2.run(on_ranks.try_update, key, nan_in_last_row, "tensor")
    assert (first[0], second[0]) == (False, False)
    assert told in first[1]
    assert found in second[1]
    done, message, _ = tp2.run(on_ranks.try_update, key, glm, "tensor")[0]
    assert done, message


def test_the_first_ranks_report_has_what_another_violates(
    tp2: Ranks, glm: Path, small_head: Path, tmp_path: Path
) -> None:
    sound, _ = tp2.run(on_ranks.report, glm, tmp_path)
    for folder in tmp_path.iterdir():
        for file in folder.iterdir():
            file.unlink()
    served, _ = tp2.run(on_ranks.report, small_head, tmp_path, {"on_violation": "warn"})
    (violation,) = served["violations"]
    assert (violation["layer"], violation["found"]) == (1, "broken on tensor parallel rank 1, sound on this one")
    assert served["canary"]["left_out"] == 1
    noise = [layer["sqnr_db"] for layer in served["layers"]]
    assert noise[1] < 28 < min(noise[0], noise[2])
    assert min(layer["sqnr_db"] for layer in sound["layers"]) > 28
    with pytest.raises(RankFailed) as failure:
        tp2.run(on_ranks.load, small_head)
    for rank in ("rank 0: ModelContractError", "rank 1: ModelContractError"):
        assert rank in str(failure.value)


def test_a_rank_that_has_the_worse_head_tells_the_others(tp2: Ranks, tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    """Without a violation too: the first rank's figure is that of all heads."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    quiet = edit_layer_1(glm, tmp_path / "model", lambda weight: weight[-1].mul_(2**-12))
    (alone,) = tp1.run(on_ranks.report, quiet, folders[0])
    spread, _ = tp2.run(on_ranks.report, quiet, folders[1])
    noise = [layer["sqnr_db"] for layer in spread["layers"]]
    assert len(noise) == LAYERS
    assert noise[1] < min(noise[0], noise[2]) - 0.1
    # of sixteen heads one rank looks at every second one, the last not among them
    assert noise[1] < alone["layers"][1]["sqnr_db"] - 0.1
