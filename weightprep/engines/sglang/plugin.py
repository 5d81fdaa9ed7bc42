"""Registration: makes `--load-format weightprep` a load format that sglang accepts.

sglang calls `register` in the launcher, the scheduler and every helper process, before it parses arguments. So this
module imports nothing heavy, and without the flag it changes nothing: one more word among the choices, and two
functions that pass through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from weightprep.engines.sglang.versions import SERVER_ARGS, SERVER_ARGS_GIVEN, VERIFY_LOAD_FORMAT

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "weightprep"

logger = logging.getLogger(__name__)

# Whether a model of this process was loaded in our format. Releases up to 0.5.15 write a draft's own load format into
# the server's arguments, which then tell no more of the target's.
_was_asked = False


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
    global _was_asked
    asked = load_config.load_format
    if not isinstance(asked, str) or asked.lower() != LOAD_FORMAT:
        _leave_out_our_keys(load_config)
        original(load_config)
        return
    _was_asked = True
    from weightprep.engines.sglang.guard import guard_loader_choice
    from weightprep.engines.sglang.loader import WeightprepLoader

    guard_loader_choice(load_config)
    load_config.load_format = WeightprepLoader


def _leave_out_our_keys(load_config: Any) -> None:
    """Before another load format's loader refuses them: sglang hands one extra config to a model and to its draft."""
    extra = load_config.model_loader_extra_config
    if not isinstance(extra, dict) or not extra:
        return
    from weightprep.engines.sglang.lora import server_arguments

    if not _was_asked and not _names_our_format(server_arguments()):
        return
    from weightprep.engines.sglang.options import Options

    ours = sorted(key for key in extra if key in Options.model_fields)
    if ours:
        # the arguments of the server may hold the same dict
        load_config.model_loader_extra_config = {key: value for key, value in extra.items() if key not in ours}
        logger.info(
            "weightprep: %s of --model-loader-extra-config left out for load format %s",
            ", ".join(ours),
            getattr(load_config.load_format, "value", load_config.load_format),
        )


def _names_our_format(server: Any) -> bool:
    """Whether the model or its draft is to be loaded in our format.

    :param server: sglang's ServerArgs, or None
    """
    formats = (getattr(server, "load_format", None), getattr(server, "speculative_draft_load_format", None))
    return LOAD_FORMAT in (str(asked).lower() for asked in formats)


def _server_args_given(original: Callable[[Any], None], server: Any) -> None:
    """Around the method of ServerArgs from where on sglang reads the model's files and replaces load formats."""
    if _names_our_format(server):
        from weightprep.engines.sglang.guard import guard_server

        guard_server(server)
    original(server)
