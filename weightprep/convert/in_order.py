"""Judges many subjects at once and tells what is found in their order, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from weightprep.convert.files import Progress

__all__ = ["in_order"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_order(
    pool: ThreadPoolExecutor,
    progress: Progress,
    judge: Callable[[_T], _R],
    subjects: Sequence[_T],
    size: Callable[[_T], tuple[str, int]],
) -> Iterator[_R]:
    """What `judge` finds of each of `subjects`.

    :param size: the file in which a subject is, and its bytes there, for `progress`
    """
    totals: dict[str, int] = {}
    for file, nbytes in map(size, subjects):
        totals[file] = totals.get(file, 0) + nbytes
    begun: str | None = None
    for subject, found in zip(subjects, pool.map(judge, subjects), strict=True):
        file, nbytes = size(subject)
        if file != begun:
            if begun is not None:
                progress.end(begun)
            progress.begin(file, totals[file])
            begun = file
        progress.advance(file, nbytes)
        yield found
    if begun is not None:
        progress.end(begun)
