"""Says in the log which kernel paths calls really took, each once, when the first forward passes take them.

The table at startup has what the gates choose. Whether a call then went there, and in which kind of layer, shows when
it is made: at warm-up, and for a path of large batches later.
"""

from __future__ import annotations

import logging
from typing import Any

from weightprep.engines.sglang.modules import kept_attentions, live_modules
from weightprep.recipe import NEXTN_GROUP, ModelPlan
from weightprep.runtime import witness

__all__ = ["be_silent", "layer_of", "mark_layers", "say_paths"]

logger = logging.getLogger(__name__)

_LAYER = "_weightprep_layer"


def mark_layers(model: Any, plan: ModelPlan) -> None:
    """Let the hooks see at an attention of `model` in which kind of layer it is."""
    for module in live_modules(model, plan):
        setattr(module.owner, _LAYER, module.plan.group)
    for _, owner in kept_attentions(model, plan):
        setattr(owner, _LAYER, NEXTN_GROUP)


def layer_of(attention: Any) -> str:
    """Kind of the layer that `attention` is in; empty where that is not known, as of the canary's stand-in."""
    return getattr(attention, _LAYER, "")


def be_silent() -> None:
    """While a model is loaded: the calls of the canary are none of the model's."""
    witness.announce(None)


def say_paths() -> None:
    """From here on each path is logged when it is first taken in this process."""
    witness.announce(_say)


def _say(event: witness.Event) -> None:
    if event.reason is not None:
        logger.info("weightprep: left to sglang: %s: %s", event.path, event.reason)
        return
    what = f"{event.operation} {event.path}" if event.operation else event.path
    logger.info("weightprep: taken: %s%s", what, f" ({event.layer})" if event.layer else "")
