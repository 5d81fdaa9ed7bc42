"""Follows weight updates that copy straight into parameters and call nothing afterwards.

`update_weights_from_tensor` with load_format "direct", or with a custom loader, leaves w_kc and w_vc as they were:
upstream then serves the old absorbed weights with the new rest of the model. Here post_load_weights is called for the
models that are prepared, so that such an update is as good as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightprep.engines.sglang.guard import ensure_hook
from weightprep.engines.sglang.prepare import preparation_of
from weightprep.engines.sglang.versions import UPDATE_FROM_TENSOR, installed_root

__all__ = ["follow_updates"]

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
    result = original(updater, named_tensors, load_format)
    if load_format not in _LOADED:
        model = updater.get_model() if hasattr(updater, "get_model") else updater.model
        for holder, _ in preparation_of(model):
            holder.post_load_weights()
    return result
