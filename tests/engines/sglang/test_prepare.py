"""What `--load-format weightprep` makes of GLM in the real loaders of sglang, bit for bit."""

from __future__ import annotations

from pathlib import Path

import on_ranks
import pytest
import torch
from live_sglang import Absorbed
from ranks import RankFailed, Ranks
from tiny_models import HEADS, LAYERS, NOPE, RANK, V, scale_kv_b, write_eagle3

FP8 = torch.float8_e4m3fn


def assert_same_bits(left: dict[int, Absorbed], right: dict[int, Absorbed]) -> None:
    assert left.keys() == right.keys()
    for layer in left:
        for name, a, b in zip(("w_kc", "w_vc", "w_scale"), left[layer].bits, right[layer].bits, strict=True):
            assert torch.equal(a, b), f"layer {layer}: {name} differs"
        assert left[layer].strides == right[layer].strides


@pytest.fixture(scope="module")
def online(tp1: Ranks, glm: Path) -> dict[int, Absorbed]:
    return tp1.run(on_ranks.load, glm)[0]


@pytest.fixture(scope="module")
def online_nextn(tp1: Ranks, glm: Path) -> dict[int, Absorbed]:
    return tp1.run(on_ranks.load, glm, draft=True)[0]


def test_decoder_equals_upstreams_own_cast(tp1: Ranks, glm: Path, online: dict[int, Absorbed]) -> None:
    assert sorted(online) == list(range(LAYERS))
    assert_same_bits(online, tp1.run(on_ranks.load_with_upstreams_cast, glm)[0])


def test_nextn_is_fp8_where_upstream_leaves_it_in_bf16(
    tp1: Ranks, glm: Path, online_nextn: dict[int, Absorbed]
) -> None:
    upstream = tp1.run(on_ranks.load_with_upstreams_cast, glm, draft=True)[0][LAYERS]
    ours = online_nextn[LAYERS]
    assert upstream.w_kc.dtype is torch.bfloat16
    assert (ours.w_kc.dtype, ours.w_vc.dtype) == (FP8, FP8)
    assert tuple(ours.w_kc.shape) == (HEADS, NOPE, RANK)
    assert tuple(ours.w_vc.shape) == (HEADS, RANK, V)
    assert ours.strides == ((NOPE * RANK, 1, NOPE), (RANK * V, 1, RANK), ())
    for made, original in ((ours.w_kc, upstream.w_kc), (ours.w_vc, upstream.w_vc)):
        error = (made.float() * ours.w_scale - original.float()).norm() / original.float().norm()
        # e4m3 rounds to 4 significant bits: at most 2^-4 of a value, 2.65 % in the mean square of normal data
        assert error < 0.03


@pytest.mark.parametrize(
    ("target_format", "draft_format", "dtypes"),
    [
        ("weightprep", None, (FP8, FP8)),
        ("weightprep", "weightprep", (FP8, FP8)),
        ("weightprep", "auto", (FP8, torch.bfloat16)),
        ("auto", "weightprep", (torch.bfloat16, FP8)),
    ],
    ids=["unset", "both", "target", "draft"],
)
def test_draft_is_loaded_in_the_targets_format_unless_it_has_its_own(
    target_format: str,
    draft_format: str | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    tp1: Ranks,
    glm: Path,
    online: dict[int, Absorbed],
    online_nextn: dict[int, Absorbed],
) -> None:
    target, draft = tp1.run(on_ranks.load_target_and_draft, glm, target_format, draft_format)[0]
    assert (target[0].w_kc.dtype, draft[LAYERS].w_kc.dtype) == dtypes
    for loaded, ours in ((target, online), (draft, online_nextn)):
        if next(iter(loaded.values())).w_kc.dtype is FP8:
            assert_same_bits(loaded, ours)


def test_a_draft_that_nothing_is_known_of_names_the_way_out(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    """In its own load; one that is here already is refused before the target is loaded, see test_guard."""
    write_eagle3(tmp_path)
    with pytest.raises(RankFailed) as failed:
        tp1.run(on_ranks.load_target_and_draft, glm, "weightprep", None, tmp_path)
    message = str(failed.value)
    assert "RecipeError: draft: architecture LlamaForCausalLMEagle3: found no recipe for it" in message
    assert "leave this one to sglang with --speculative-draft-load-format auto; or " in message


def test_ranks_hold_slices_of_the_whole_tensors_bytes(
    tp2: Ranks, glm: Path, online: dict[int, Absorbed], online_nextn: dict[int, Absorbed]
) -> None:
    for draft, whole in ((False, online), (True, online_nextn)):
        parts = tp2.run(on_ranks.load, glm, draft=draft)
        for layer, absorbed in whole.items():
            for name in ("w_kc", "w_vc"):
                joined = torch.cat([getattr(part[layer], name).view(torch.uint8) for part in parts])
                assert torch.equal(joined, getattr(absorbed, name).view(torch.uint8)), f"layer {layer}: {name}"
            assert [float(part[layer].w_scale) for part in parts] == [float(absorbed.w_scale)] * 2


def test_ranks_agree_in_one_collective(tp2: Ranks, glm: Path) -> None:
    """On the scales of all layers, and in another on what the check found in them."""
    scales, check = ("MAX", 3 * LAYERS), ("MAX", 2 * LAYERS)
    for calls in tp2.run(on_ranks.load_counting_collectives, glm, on_ranks.GFX950):
        assert calls == [scales, check]
    for calls in tp2.run(on_ranks.load_counting_collectives, glm, on_ranks.GFX950 | {"scale_scope": "rank"}):
        assert calls == [check]


def test_rank_scope_gives_upstreams_scale_of_each_rank(tp2: Ranks, glm: Path) -> None:
    ours = tp2.run(on_ranks.load, glm, extra=on_ranks.GFX950 | {"scale_scope": "rank"})
    for mine, upstream in zip(ours, tp2.run(on_ranks.load_with_upstreams_cast, glm), strict=True):
        assert_same_bits(mine, upstream)


def test_second_load_keeps_storage_and_follows_new_weights(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    other = scale_kv_b(glm, tmp_path / "other", 3.0)
    before = tp1.run(on_ranks.load, glm)[0]
    done, message, after = tp1.run(on_ranks.update_from_disk, (str(glm), "weightprep", False), other)[0]
    assert done, message
    assert_same_bits(after, tp1.run(on_ranks.load, other)[0])
    for layer, absorbed in after.items():
        assert absorbed.pointers == before[layer].pointers
        assert float(absorbed.w_scale) > 2 * float(before[layer].w_scale)
