"""Counts of the kernel paths that calls really took, because a gate that misses makes no error, only a slow layer.

A path is a short name such as ``absorb/triton/fp8/fp8_group``. A call that was left to somebody else is declined, under
the name of the path that was meant for it, with the reason. A path of this package that another one of it stood in for
is passed over: that may cost time, but leaves no call to others. Inside a captured CUDA graph a call is counted once,
when it is captured. Python that torch.compile traces counts nothing, since Dynamo can neither take the lock nor repeat
the count; weightprep's custom operators are opaque to it, and count each of their calls in compiled code too.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock

import torch

__all__ = ["count", "counts", "decline", "declined", "pass_over", "passed_over", "reset"]

_taken: Counter[str] = Counter()
_declined: Counter[tuple[str, str]] = Counter()
_passed_over: Counter[tuple[str, str]] = Counter()
_lock = Lock()


def count(path: str) -> None:
    """One more call went through `path`; nothing while torch.compile traces the caller."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        _taken[path] += 1


def decline(path: str, reason: str) -> None:
    """One more call that `path` was meant for was left to somebody else, for `reason`; nothing while it is traced."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        _declined[path, reason] += 1


def pass_over(path: str, reason: str) -> None:
    """One more call that another path of this package takes, since `path` cannot; nothing while it is traced."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        _passed_over[path, reason] += 1


def counts() -> dict[str, int]:
    """Calls per path so far."""
    with _lock:
        return dict(_taken)


def declined() -> dict[tuple[str, str], int]:
    """Calls per (path, reason) that were left to somebody else."""
    with _lock:
        return dict(_declined)


def passed_over() -> dict[tuple[str, str], int]:
    """Calls per (path, reason) that another path of this package took."""
    with _lock:
        return dict(_passed_over)


def reset() -> None:
    """Forget everything counted so far, e.g. after warm-up."""
    with _lock:
        _taken.clear()
        _declined.clear()
        _passed_over.clear()
