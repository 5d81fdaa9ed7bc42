"""Progress on stderr: bars at a terminal, one plain line a while in a log file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from weightprep.convert.files import Progress as ProgressLike

__all__ = ["progress"]

_LINE_EVERY_SECONDS = 10.0


@contextmanager
def progress(total: int) -> Iterator[ProgressLike]:
    """What a conversion of `total` bytes reports to."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield _Bars(bars, total)


class _Bars:
    """One bar for all, one for each file in work."""

    def __init__(self, bars: Progress, total: int) -> None:
        self._bars = bars
        self._all = bars.add_task("all files", total=total)
        self._files: dict[str, TaskID] = {}

    def begin(self, file: str, nbytes: int) -> None:
        self._files[file] = self._bars.add_task(file, total=nbytes)

    def advance(self, file: str, nbytes: int) -> None:
        self._bars.advance(self._files[file], nbytes)
        self._bars.advance(self._all, nbytes)

    def end(self, file: str) -> None:
        self._bars.remove_task(self._files.pop(file))


class _Lines:
    """A line every few seconds: bytes, rate, time left."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = self._said = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, file: str, nbytes: int) -> None:
        pass

    def advance(self, file: str, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._said < _LINE_EVERY_SECONDS:
                return
            self._said = now
            rate = self._done / (now - self._started)
        left = max(self._total - self._done, 0) / rate
        print(
            f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    def end(self, file: str) -> None:
        pass
