"""More ranks over gloo: bytes do not depend on how many there are, and a pipeline rank answers for its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import on_ranks
import pytest
import torch
from live_sglang import Absorbed
from ranks import Ranks
from test_prepare import assert_same_bits
from tiny_models import LAYERS, scale_kv_b


@pytest.fixture(scope="module")
def online(tp1: Ranks, glm: Path) -> dict[int, Absorbed]:
    return tp1.run(on_ranks.load, glm)[0]


@pytest.fixture(scope="module", params=[2, 4, 8], ids=["tp2", "tp4", "tp8"])
def many(request: pytest.FixtureRequest, glm: Path) -> Iterator[Ranks]:
    ranks = Ranks(request.param, str(glm))
    yield ranks
    ranks.close()


def test_bytes_do_not_depend_on_the_number_of_ranks(
    many: Ranks, glm: Path, sidecar: Path, inline: Path, online: dict[int, Absorbed], tmp_path: Path
) -> None:
    parts = many.run(on_ranks.load, glm)
    for layer, whole in online.items():
        for name in ("w_kc", "w_vc"):
            joined = torch.cat([getattr(part[layer], name).view(torch.uint8) for part in parts])
            assert torch.equal(joined, getattr(whole, name).view(torch.uint8))
        assert {float(part[layer].w_scale) for part in parts} == {float(whole.w_scale)}
    for left, right in zip(parts, many.run(on_ranks.load, sidecar), strict=True):
        assert_same_bits(left, right)
    converted = many.run(on_ranks.load_without_amx, inline, "weightprep", on_ranks.GFX950)
    for left, right in zip(parts, converted, strict=True):
        assert_same_bits(left, right)

    other = scale_kv_b(glm, tmp_path / "other", 3.0)
    updates = many.run(on_ranks.update_from_disk, (str(glm), "weightprep", False), other)
    fresh = many.run(on_ranks.load, other)
    for part, (done, message, after), wanted in zip(parts, updates, fresh, strict=True):
        assert done, message
        assert_same_bits(after, wanted)
        assert [after[layer].pointers for layer in after] == [part[layer].pointers for layer in part]


def test_pipeline_ranks_answer_for_their_own_layers(glm: Path, online: dict[int, Absorbed], tmp_path: Path) -> None:
    ranks = Ranks(2, str(glm), pp_size=2)
    try:
        parts = ranks.run(on_ranks.load, glm)
        reports = ranks.run(on_ranks.report, glm, tmp_path)
    finally:
        ranks.close()
    assert sorted([*parts[0], *parts[1]]) == list(range(LAYERS))
    for part in parts:
        assert part
        assert_same_bits(part, {layer: online[layer] for layer in part})
    assert [len(report["layers"]) for report in reports] == [len(part) for part in parts]
    assert [report["file"] for report in reports] == ["report.pp0.json", "report.pp1.json"]


def test_no_collective_where_kv_b_is_replicated(glm: Path, online: dict[int, Absorbed], tmp_path: Path) -> None:
    """DP attention: each rank holds every head, and the first reports for all."""
    ranks = Ranks(2, str(glm), dp_size=2, enable_dp_attention=True)
    try:
        calls = ranks.run(on_ranks.load_counting_collectives, glm, on_ranks.GFX950)
        parts = ranks.run(on_ranks.load, glm)
        (first, first_log), (second, second_log) = ranks.run(on_ranks.report_and_log, glm, tmp_path)
    finally:
        ranks.close()
    assert calls == [[], []]
    assert (first["file"], len(first["layers"]), second) == ("report.json", LAYERS, {})
    assert [sum("recipe glm_moe_dsa" in message for message in log) for log in (first_log, second_log)] == [1, 0]
    for part in parts:
        assert_same_bits(part, online)
