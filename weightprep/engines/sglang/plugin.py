"""Registration: makes `--load-format weightprep` a load format that sglang accepts.

sglang calls `register` in the launcher, the scheduler and every helper process, before it parses arguments. So this
module imports nothing heavy, and without the flag it changes nothing: one more word among the choices, and two
functions that pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightprep.engines.sglang.versions import SERVER_ARGS, SERVER_ARGS_GIVEN, VERIFY_LOAD_FORMAT

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "weightprep"


def register() -> None:
    """Entry point `sglang.srt.plugins`. Calling it again changes nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES, ServerArgs

    if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
        return
    # Several arguments hold this very list, so it is extended in place.
    LOAD_FORMAT_CHOICES.append(LOAD_FORMAT)
    HookRegistry.register(VERIFY_LOAD_FORMAT, _verify_load_format, HookType.AROUND)
    given = next((name for name in SERVER_ARGS_GIVEN if hasattr(ServerArgs, name)), None)
    if given is not None:
        HookRegistry.register(f"{SERVER_ARGS}.{given}", _server_args_given, HookType.AROUND)


def _verify_load_format(original: Callable[[Any], None], load_config: Any) -> None:
    """Around LoadConfig._verify_load_format: a load format that is a class is called by sglang's get_model_loader."""
    asked = load_config.load_format
    if not isinstance(asked, str) or asked.lower() != LOAD_FORMAT:
        original(load_config)
        return
    from weightprep.engines.sglang.guard import guard_loader_choice
    from weightprep.engines.sglang.loader import WeightprepLoader

    guard_loader_choice(load_config)
    load_config.load_format = WeightprepLoader


def _server_args_given(original: Callable[[Any], None], server: Any) -> None:
    """Around the method of ServerArgs from where on sglang reads the model's files and replaces load formats."""
    formats = (server.load_format, getattr(server, "speculative_draft_load_format", None))
    if LOAD_FORMAT in (str(asked).lower() for asked in formats):
        from weightprep.engines.sglang.guard import guard_server

        guard_server(server)
    original(server)
