"""Follows weight updates from tensors, where sglang neither prepares all of them nor answers a refusal.

`update_weights_from_tensor` with load_format "direct", or with a custom loader, copies straight into parameters and
calls nothing afterwards: upstream then serves the old absorbed weights with the new rest of the model. Here
post_load_weights is called for the models that are prepared. And what is raised there would end the server, while the
other routes answer their request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from weightprep.engines.sglang.guard import ensure_hook
from weightprep.engines.sglang.post_load import preparation_of
from weightprep.engines.sglang.versions import UPDATE_FROM_TENSOR, installed_root
from weightprep.errors import WeightprepError

__all__ = ["follow_updates"]

logger = logging.getLogger(__name__)

# formats that end in model.load_weights, which calls post_load_weights itself
_LOADED = (None, "flattened_bucket")


def follow_updates() -> None:
    """Hook the updates of the running sglang. Calling it again changes nothing."""
    root = installed_root()
    target = UPDATE_FROM_TENSOR.found(root) if root is not None else None
    if target is not None:
        ensure_hook(target, _update_weights_from_tensor)


def _update_weights_from_tensor(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """Around WeightUpdater.update_weights_from_tensor, ModelRunner's in older releases."""
    try:
        result = original(updater, named_tensors, load_format)
        if load_format not in _LOADED:
            model = updater.get_model() if hasattr(updater, "get_model") else updater.model
            for holder, _ in preparation_of(model):
                holder.post_load_weights()
    except WeightprepError as error:
        message = f"{error}\nThe model's weights are updated in part: send sound ones before it serves again."
        logger.error("weightprep: %s", message)
        return False, message
    return result
