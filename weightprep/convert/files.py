"""Writes the files of a plan with a few threads: bytes move in the kernel or in torch, which hold no lock of Python's.

A file counts as finished when it is synced under its final name and its line is in the journal, in this order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from weightprep.checkpoint.manifest import ModuleRecord
from weightprep.checkpoint.repository import TensorRef
from weightprep.checkpoint.writer import ShardWriter, fsync_directory
from weightprep.convert.by_table import convert_by_table, has_table
from weightprep.convert.journal import Entry
from weightprep.convert.module import convert_module
from weightprep.convert.partial import temporary_of, tree_of
from weightprep.convert.placing import place_file, replace_file, sync_file
from weightprep.convert.plan import ConversionPlan, ModuleJob, ShardJob, SourceStamp
from weightprep.errors import CheckpointError

__all__ = [
    "FileRunner",
    "Progress",
    "Records",
    "Stop",
    "StoppedError",
    "Unwatched",
    "check_unchanged",
]


_P = ParamSpec("_P")
_T = TypeVar("_T")


class Progress(Protocol):
    """Who wants to know how far a conversion is; called from several threads."""

    def begin(self, file: str, nbytes: int) -> None:
        """Work on `file` begins."""

    def advance(self, file: str, nbytes: int) -> None:
        """`nbytes` more of `file` are there."""

    def end(self, file: str) -> None:
        """`file` is finished."""


class Unwatched:
    """Progress that nobody looks at."""

    def begin(self, file: str, nbytes: int) -> None: ...

    def advance(self, file: str, nbytes: int) -> None: ...

    def end(self, file: str) -> None: ...


class Records(Protocol):
    """Who is told of finished files: the journal, or a worker's report to the process that has it."""

    def add(self, entry: Entry) -> None:
        """`entry`'s file is whole and on the disk."""


class Stop(Protocol):
    """Tells everybody at work to leave off at the next chunk; threading.Event is one."""

    def set(self) -> None:
        """From now on."""

    def is_set(self) -> bool:
        """Whether somebody has."""


class StoppedError(Exception):
    """This file was given up because another one failed, or because of an interrupt."""


class FileRunner:
    """The threads of one run and what they have finished.

    :param attempt: in the names of unfinished files, where several processes may write the same one
    :param stop: one that reaches farther than this process
    :ivar entries: file -> journal entry
    :ivar placed: "hard", "reflink", "copy" or "rewritten" -> how many files
    """

    def __init__(
        self,
        plan: ConversionPlan,
        journal: Records,
        progress: Progress,
        *,
        attempt: str = "",
        stop: Stop | None = None,
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.placed: dict[str, int] = {}
        self._plan = plan
        self._journal = journal
        self._progress = progress
        self._attempt = attempt
        self._lock = threading.Lock()
        self._stop: Stop = threading.Event() if stop is None else stop
        self._failure: BaseException | None = None
        self._moving = threading.Semaphore(plan.options.workers)

    def run(self, jobs: Sequence[ShardJob]) -> None:
        """Write the files of `jobs`; the first failure, or an interrupt, stops the others at their next chunk.

        No thread is left, and nothing half-written, when this returns or raises.
        """
        workers = self._plan.options.workers
        if workers == 1:
            # No pool: a debugger works, and an interrupt arrives where the work is.
            for job in jobs:
                self._one(job, None)
            return
        # Twice as many: a file that waits for the disk to have it must not keep others from being read. And modules
        # beside them: a shard of all of them takes no longer than the same modules in many shards.
        with ThreadPoolExecutor(workers) as converting, ThreadPoolExecutor(2 * workers) as pool:
            try:
                wait([pool.submit(self._guarded, self._one, job, converting) for job in jobs])
            except BaseException:
                self._stop.set()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        if self._failure is not None:
            raise self._failure

    def _guarded(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What `work` returns, in a thread: its failure, if it is the first one, is the run's, and ends the others.

        :raises StoppedError: it failed, or was given up
        """
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            with self._lock:
                if self._failure is None and not isinstance(error, StoppedError):
                    self._failure = error
            self._stop.set()
            raise StoppedError from None

    def _one(self, job: ShardJob, converting: Executor | None) -> None:
        if self._stop.is_set():
            raise StoppedError
        final = tree_of(self._plan.options.partial) / job.name
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(self._plan.options.partial, job.name, self._attempt)
        temporary.unlink(missing_ok=True)
        sources = {job.source, *(ref.path for module in job.modules for ref in module.source_refs)}
        stamps = [self._plan.stamps[path] for path in sources]
        try:
            with contextlib.ExitStack() as moving:
                moving.enter_context(self._moving)
                if converting is not None:
                    # before its turn goes to a file that waits for one
                    moving.push(self._end_others)
                if self._stop.is_set():
                    raise StoppedError
                self._progress.begin(job.name, job.nbytes)
                check_unchanged(stamps)
                if job.rewritten:
                    records, how = self._rewrite(job, temporary, moving.close, converting), "rewritten"
                else:
                    records, how = (), place_file(job.source, temporary, self._plan.options.link, self._on_bytes(job))
                    moving.close()
                    sync_file(temporary)
            check_unchanged(stamps)
            replace_file(temporary, final)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(final.parent)
        with self._lock:
            entry = Entry(job.name, job.nbytes, records)
            self._journal.add(entry)
            self.entries[job.name] = entry
            self.placed[how] = self.placed.get(how, 0) + 1
        self._progress.end(job.name)

    def _end_others(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()

    def _rewrite(
        self, job: ShardJob, path: Path, moved: Callable[[], None], converting: Executor | None
    ) -> tuple[ModuleRecord, ...]:
        """Write the shard of `job`; `moved` is called when only the disk has still to do something."""
        on_bytes = self._on_bytes(job)
        copied: list[TensorRef] = [tensor.copied for tensor in job.tensors if tensor.copied is not None]
        with ShardWriter(path, [t.info for t in job.tensors], job.metadata or {}, on_bytes=on_bytes) as writer:
            if converting is None:
                writer.copy(copied)
                records = [self._convert(module, job, writer) for module in job.modules]
            else:
                futures = [converting.submit(self._guarded, self._convert, m, job, writer) for m in job.modules]
                try:
                    # A failure of either side has to reach the other one before it is waited for.
                    self._guarded(writer.copy, copied)
                    records = [future.result() for future in futures]
                finally:
                    # The writer may not be closed under a module that is still being written.
                    for future in futures:
                        future.cancel()
                    wait(futures)
            moved()
            writer.finish()
        return tuple(records)

    def _convert(self, module: ModuleJob, job: ShardJob, writer: ShardWriter) -> ModuleRecord:
        """In a function of its own, so that one module's tensors are gone before the next one's are read."""
        if self._stop.is_set():
            raise StoppedError
        dims, file = self._plan.model.dims, self._plan.options.listed(job.name)
        if has_table(module):
            return convert_by_table(module, dims, file, writer.write_slices)
        converted = convert_module(module, dims, file)
        for role, tensor in converted.tensors.items():
            writer.write(module.outputs[role].name, tensor)
        return converted.record

    def _on_bytes(self, job: ShardJob) -> Callable[[int], None]:
        def advance(nbytes: int) -> None:
            if self._stop.is_set():
                raise StoppedError
            self._progress.advance(job.name, nbytes)

        return advance


def check_unchanged(stamps: Sequence[SourceStamp]) -> None:
    """Refuse source files that are no longer what was planned with.

    :raises CheckpointError: size, modification time or the first bytes, a header's, differ
    """
    for stamp in stamps:
        try:
            now = SourceStamp.of(stamp.path)
        except FileNotFoundError:
            found = "no file any more"
        else:
            if now == stamp:
                continue
            found = f"{now.size} bytes, modified at {now.mtime_ns} ns, first bytes {now.head_sha256[:8]}"
        raise CheckpointError(
            stamp.path,
            found=found,
            wanted=f"what the plan was made from: {stamp.size} bytes, {stamp.mtime_ns} ns, {stamp.head_sha256[:8]}",
            remedy="let whatever writes the source finish, then convert again",
        )
