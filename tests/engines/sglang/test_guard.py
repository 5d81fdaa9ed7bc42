"""What is refused before sglang reads anything of the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weightprep.engines.sglang.plugin import _server_args_given
from weightprep.errors import EngineError


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
