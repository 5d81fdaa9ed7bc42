"""Counts of the kernel paths that calls really took, because a gate that misses makes no error, only a slow layer.

A path is a short name such as ``absorb/triton/fp8/fp8_group``. A call that was left to somebody else is declined, under
the name of the path that was meant for it, with the reason. A path of this package that another one of it stood in for
is passed over: that may cost time, but leaves no call to others. Who embeds this package can say who calls, and in
which kind of layer, and be told of each path when it is first taken. Inside a captured CUDA graph a call is counted
once, when it is captured. Python that torch.compile traces counts nothing, since Dynamo can neither take the lock nor
repeat the count; weightprep's custom operators are opaque to it, and count each of their calls in compiled code too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock, local

import torch

__all__ = [
    "Event",
    "announce",
    "calling",
    "count",
    "counts",
    "counts_by_layer",
    "decline",
    "declined",
    "pass_over",
    "passed_over",
    "reset",
]


@dataclass(frozen=True, slots=True)
class Event:
    """What happened for the first time.

    :param path: that was taken, or that was meant for the call
    :param operation: of the caller, empty where it did not say
    :param layer: kind of layer, empty where the caller did not say
    :param reason: why the call was left to somebody else; None where `path` was taken
    """

    path: str
    operation: str = ""
    layer: str = ""
    reason: str | None = None


class _Caller(local):
    operation = ""
    layer = ""


_caller = _Caller()
_announce: Callable[[Event], None] | None = None
_announced: set[Hashable] = set()
_taken: Counter[tuple[str, str]] = Counter()
_declined: Counter[tuple[str, str]] = Counter()
_passed_over: Counter[tuple[str, str]] = Counter()
_lock = Lock()


def announce(listener: Callable[[Event], None] | None) -> None:
    """From here on `listener` is told of each event once in the life of the process, where it happens; None is silent.

    It is called in the middle of a model's forward pass, and while a graph is captured: it must not touch the device.
    """
    global _announce
    _announce = listener


class calling:  # used as a function
    """What this thread calls inside is for `operation`, in a layer of kind `layer`.

    Nothing while torch.compile traces the caller, whose calls are counted without them. It must not be nested.
    """

    def __init__(self, operation: str, layer: str = "") -> None:
        self._operation, self._layer = operation, layer

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            _caller.operation, _caller.layer = self._operation, self._layer

    def __exit__(self, *raised: object) -> None:
        if not torch.compiler.is_compiling():
            _caller.operation = _caller.layer = ""


def count(path: str) -> None:
    """One more call went through `path`; nothing while torch.compile traces the caller."""
    if torch.compiler.is_compiling():
        return
    operation, layer = _caller.operation, _caller.layer
    with _lock:
        _taken[path, layer] += 1
    if _announce is not None and (path, operation, layer) not in _announced:
        _announced.add((path, operation, layer))
        _announce(Event(path, operation, layer))


def decline(path: str, reason: str) -> None:
    """One more call that `path` was meant for was left to somebody else, for `reason`; nothing while it is traced."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        _declined[path, reason] += 1
    if _announce is not None and (path, reason) not in _announced:
        _announced.add((path, reason))
        _announce(Event(path, reason=reason))


def pass_over(path: str, reason: str) -> None:
    """One more call that another path of this package takes, since `path` cannot; nothing while it is traced."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        _passed_over[path, reason] += 1


def counts() -> dict[str, int]:
    """Calls per path so far."""
    total: Counter[str] = Counter()
    for (path, _), calls in counts_by_layer().items():
        total[path] += calls
    return dict(total)


def counts_by_layer() -> dict[tuple[str, str], int]:
    """Calls per (path, kind of layer) so far; the kind is empty where the caller did not say."""
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
