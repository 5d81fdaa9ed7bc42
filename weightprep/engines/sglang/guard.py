"""Makes sure that sglang's choice of a loader is ours when the user asked for ours.

Some releases look at a model's quantization, or at the weight cache, before they look at the load format. The server
then starts with weights that nobody prepared, and nothing says so. The guard is put up when the flag is first seen,
never without it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightprep.checkpoint.config import read_config
from weightprep.engines.sglang.options import Options, explaining_draft, split_options
from weightprep.engines.sglang.versions import GET_MODEL_LOADER, check_support
from weightprep.errors import EngineError, WeightprepError
from weightprep.recipe import find_recipe

__all__ = ["ensure_hook", "guard_loader_choice", "guard_server"]

logger = logging.getLogger(__name__)


def guard_server(server: Any) -> None:
    """Refuse what sglang would load in another way, or in processes that have no plugins.

    :param server: sglang's ServerArgs before it has chosen a load format
    :raises EngineError: a remote model, Ray actors, or a key of ours that is misspelt or has no such value
    :raises RecipeError: a draft in our format for which there is no recipe
    """
    options, _ = split_options(_extra_config(server))
    draft_format = getattr(server, "speculative_draft_load_format", None) or server.load_format
    for flag, path, load_format in (
        ("--model-path", getattr(server, "model_path", None), server.load_format),
        ("--speculative-draft-model-path", getattr(server, "speculative_draft_model_path", None), draft_format),
    ):
        if "://" in str(path or "") and str(load_format).lower() == "weightprep":
            raise EngineError(
                f"{flag} {path}",
                found="a remote model, for which sglang replaces the load format by one of its own",
                wanted="a local directory or a hub id with --load-format weightprep",
                remedy="download the model first; or convert it inline with `weightprep convert`, upload that and "
                "serve it without the flag",
            )
    if getattr(server, "use_ray", False):
        raise EngineError(
            "--use-ray",
            found="Ray actors, in which sglang loads no plugins",
            wanted="sglang's own scheduler processes with --load-format weightprep",
            remedy="leave --use-ray out, or serve a checkpoint from `weightprep convert --layout inline` without the "
            "flag",
        )
    if str(draft_format).lower() == "weightprep":
        _refuse_unknown_draft(server, options)


def _refuse_unknown_draft(server: Any, options: Options) -> None:
    """What the draft's own load would say, but that comes after the target's, which may take an hour.

    A hub id is left to that: its files may not be here yet.
    """
    path = getattr(server, "speculative_draft_model_path", None)
    if path and not options.recipe and (Path(path) / "config.json").is_file():
        config = read_config(Path(path))
        model_type = config.raw.get("model_type")
        with explaining_draft(True):
            find_recipe((*config.architectures, "(none)")[0], model_type if isinstance(model_type, str) else None)


def _extra_config(server: Any) -> dict[str, Any]:
    """What --model-loader-extra-config holds; nothing where it is no JSON object, which sglang refuses itself."""
    given = getattr(server, "model_loader_extra_config", None)
    try:
        parsed = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def guard_loader_choice(load_config: Any) -> None:
    """Refuse what the load config alone shows to be impossible, and watch the choice that follows.

    :raises EngineError: sglang is not supported, or the weight cache is on
    """
    notice = check_support()
    if notice is not None:
        logger.warning("weightprep: %s", notice)
    mode = getattr(load_config, "weight_cache_mode", "off")
    if mode != "off":
        raise EngineError(
            f"--weight-cache-mode {mode}",
            found="the weight cache, which fills the model without asking the load format",
            wanted="--weight-cache-mode off with --load-format weightprep",
            remedy="turn the weight cache off, or serve a checkpoint from `weightprep convert` without the flag",
        )
    ensure_hook(GET_MODEL_LOADER, _choose)


def ensure_hook(target: str, hook: Callable[..., Any]) -> None:
    """Put `hook` around `target` once, and make sure that it took: sglang only logs a hook that failed.

    :raises EngineError: the hook is not in place
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if any(registered is hook for _, registered, _ in HookRegistry._hooks.get(target, ())):
        if target in HookRegistry._patched:
            return
    elif target in HookRegistry._patched:
        others = ", ".join(str(source) for _, _, source in HookRegistry._hooks[target])
        raise EngineError(
            target,
            found=f"hooks of another plugin that were applied before ({others})",
            wanted="weightprep's hook on it",
            remedy="leave the other plugin out with SGLANG_PLUGINS",
        )
    else:
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    if target not in HookRegistry._patched:
        raise EngineError(
            target,
            found="a hook that sglang could not apply (see its log)",
            wanted="the hook in place",
            remedy="run `weightprep doctor`; use a known sglang release",
        )


def _choose(original: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    from weightprep.engines.sglang.loader import WeightprepLoader

    if WeightprepLoader not in (load_config.load_format, getattr(load_config, "fallback_load_format", None)):
        return original(load_config, *args, **kwargs)
    try:
        loader = original(load_config, *args, **kwargs)
    except WeightprepError:
        raise
    except Exception as error:
        # the loader that was chosen instead stumbles over our keys
        raise _not_ours(f"sglang chose another loader, which failed: {error}") from error
    if not isinstance(loader, WeightprepLoader):
        raise _not_ours(f"sglang chose {type(loader).__name__} for this model")
    return loader


def _not_ours(found: str) -> EngineError:
    return EngineError(
        "--load-format weightprep",
        found=found,
        wanted="weightprep's loader",
        remedy="this sglang loads such a model in its own way only: upgrade to 0.5.18 or later, or drop the flag",
    )
