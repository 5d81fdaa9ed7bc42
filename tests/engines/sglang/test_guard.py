"""What is refused before sglang reads anything of the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import write_eagle3

from weightprep.engines.sglang.plugin import _server_args_given
from weightprep.errors import EngineError, RecipeError


@pytest.mark.parametrize(("target", "draft"), [("weightprep", None), ("auto", "weightprep"), ("auto", "Weightprep")])
def test_ray_is_refused_whichever_model_is_ours(target: str, draft: str | None) -> None:
    server = SimpleNamespace(load_format=target, speculative_draft_load_format=draft, use_ray=True)
    with pytest.raises(EngineError, match="--use-ray"):
        _server_args_given(lambda _: None, server)


def test_a_server_without_our_format_is_left_alone() -> None:
    seen = []
    server = SimpleNamespace(load_format="auto", speculative_draft_load_format=None, use_ray=True)
    _server_args_given(seen.append, server)
    assert seen == [server]


def draft_of(path: Path, draft_format: str | None, extra: str = "{}") -> SimpleNamespace:
    return SimpleNamespace(
        load_format="weightprep",
        speculative_draft_load_format=draft_format,
        speculative_draft_model_path=str(path),
        model_loader_extra_config=extra,
    )


@pytest.mark.parametrize("draft_format", [None, "weightprep"])
def test_a_draft_without_a_recipe_is_refused_before_its_target_is_loaded(
    draft_format: str | None, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="LlamaForCausalLMEagle3") as refused:
        _server_args_given(lambda _: None, draft_of(write_eagle3(tmp_path), draft_format))
    assert "leave this one to sglang with --speculative-draft-load-format auto; or " in refused.value.remedy


def test_drafts_that_may_load_are_left_alone(tmp_path: Path, glm: Path) -> None:
    seen: list[object] = []
    eagle3 = write_eagle3(tmp_path)
    servers = (
        draft_of(eagle3, "auto"),
        draft_of(eagle3, None, '{"recipe": "mine.yaml"}'),
        draft_of(glm, None),
        draft_of(Path("zai-org/a-draft"), None),
    )
    for server in servers:
        _server_args_given(seen.append, server)
    assert seen == list(servers)
