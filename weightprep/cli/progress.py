"""Progress on stderr: bars at a terminal, one plain line a while in a log file."""

from __future__ import annotations

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

from weightprep.cli.output import printable, say
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
        TextColumn("{task.description}", markup=False),
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
        self._files[file] = self._bars.add_task(printable(file), total=nbytes)

    def advance(self, file: str, nbytes: int) -> None:
        self._bars.advance(self._files[file], nbytes)
        self._bars.advance(self._all, nbytes)

    def end(self, file: str) -> None:
        self._bars.remove_task(self._files.pop(file))


class _Lines:
    """A line every few seconds: bytes, rate and time left of all, and how far the files in work are."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = self._said = time.monotonic()
        self._lock = threading.Lock()
        # file -> bytes there and in all
        self._files: dict[str, list[int]] = {}

    def begin(self, file: str, nbytes: int) -> None:
        with self._lock:
            self._files[file] = [0, nbytes]

    def advance(self, file: str, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._files[file][0] += nbytes
            now = time.monotonic()
            if now - self._said < _LINE_EVERY_SECONDS:
                return
            self._said = now
            rate = self._done / (now - self._started)
            files = ", ".join(f"{name} {done * 100 // max(size, 1)} %" for name, (done, size) in self._files.items())
        left = max(self._total - self._done, 0) / rate
        say(f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, {left:.0f} s left; {files}")

    def end(self, file: str) -> None:
        with self._lock:
            del self._files[file]
