"""torch, imported when it is first used.

Its import takes seconds and 600 MB, and what works on names, headers and byte ranges needs none of it: a plan is shown,
and bytes begin to move, without waiting for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch as torch
else:

    class _Deferred:
        """Stands for a module; attributes are kept, so that only the first use of each comes here."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    torch = _Deferred("torch")
