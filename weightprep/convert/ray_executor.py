"""Spreads the files of a conversion over a Ray cluster whose nodes see source and destination under the same paths.

The driver holds the journal, as a local run does, and writes a line only for a file that a node has reported whole: a
run here can go on with what a local one left, and the other way round. A worker that dies takes its unfinished file
with it, and Ray gives that file to another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightprep.convert.files import FileRunner, Progress, Unwatched
from weightprep.convert.journal import Entry, Journal, identity_of
from weightprep.convert.options import ConvertOptions
from weightprep.convert.partial import clear_unfinished, stop_file_of
from weightprep.convert.plan import ConversionPlan, ShardJob
from weightprep.convert.planner import plan_contents
from weightprep.errors import CheckpointError, EngineError, WeightprepError

__all__ = ["RayRunner", "StopFile", "ray_cluster"]

# A file whose worker died is given to another this often: one that is too large for every node must not go on for ever.
_RETRIES = 3
# How long an interrupted run waits for its workers to be gone, in seconds.
_LEAVE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A connection to the running cluster that RAY_ADDRESS or Ray itself names; one that is there already is used.

    :raises EngineError: Ray is not installed, or no cluster answers
    """
    try:
        import ray
    except ImportError:
        raise EngineError(
            "--executor ray",
            found="no ray",
            wanted="ray on this machine and on every node",
            remedy="pip install 'weightprep[ray]'",
        ) from None
    if ray.is_initialized():
        yield
        return
    try:
        _check_answers(os.environ.get("RAY_ADDRESS", ""))
        ray.init(address="auto", configure_logging=False, log_to_driver=False)
    except Exception as error:
        # Ray says by exceptions of every kind, the plain one among them, that it cannot connect.
        raise EngineError(
            "--executor ray",
            found=f"no Ray cluster that answers ({_first_line(error)})",
            wanted="a running cluster",
            remedy="start one with `ray start --head` and, on the other nodes, `ray start --address=HOST:PORT`; "
            "RAY_ADDRESS names one that is not found by itself",
        ) from None
    try:
        # Ray reports dead workers on stdout, which is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself tries a host and port that do not answer for ever."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()


@dataclass(frozen=True, slots=True)
class _Written:
    """What a worker reports of a finished file."""

    entry: Entry
    placed: str


class RayRunner:
    """The cluster's work in one run: what :class:`FileRunner` is for this machine's threads.

    :ivar entries: file -> journal entry
    :ivar placed: "hard", "reflink", "copy" or "rewritten" -> how many files
    """

    def __init__(self, plan: ConversionPlan, journal: Journal, progress: Progress) -> None:
        self.entries: dict[str, Entry] = {}
        self.placed: dict[str, int] = {}
        self._plan = plan
        self._journal = journal
        self._progress = progress

    def run(self, jobs: Sequence[ShardJob]) -> None:
        """Have the files of `jobs` written, `workers` at once for each node; the first failure stops the others.

        :raises WeightprepError: as a local run, and where workers kept dying
        """
        import ray

        # Nobody else works here: the lock on the only journal is this process's. Parts of a job array share it.
        if self._plan.options.part is None:
            clear_unfinished(self._plan.options.partial)
        write = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_write)
        options, identity = _absolute(self._plan.options), self._plan.identity
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        width = options.workers * max(len(nodes), 1)
        run = uuid.uuid4().hex
        stop = StopFile(stop_file_of(self._plan.options.partial, run))
        left = list(reversed(jobs))
        running: dict[Any, ShardJob] = {}
        try:
            while left or running:
                while left and len(running) < width:
                    job = left.pop()
                    self._progress.begin(job.name, job.nbytes)
                    running[write.remote(options, identity, job.name, run)] = job
                (ready, *_), _ = ray.wait(list(running), num_returns=1)
                self._finish(running[ready], ready)
                del running[ready]
        except BaseException:
            # Not ray.cancel: where the task comes to its end at the same moment, Ray 2.60 aborts this process.
            if running:
                stop.set()
                _, late = ray.wait(list(running), num_returns=len(running), timeout=_LEAVE_SECONDS)
                if not late:
                    stop.clear()
            raise

    def _finish(self, job: ShardJob, reference: Any) -> None:
        written = _result(job, reference)
        self._journal.add(written.entry)
        self.entries[job.name] = written.entry
        self.placed[written.placed] = self.placed.get(written.placed, 0) + 1
        self._progress.advance(job.name, job.nbytes)
        self._progress.end(job.name)


def _result(job: ShardJob, reference: Any) -> _Written:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        written: _Written = ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, (WeightprepError, OSError)):
            raise error.cause from None
        raise CheckpointError(
            job.name,
            found=f"a worker that failed: {_first_line(error.cause)}",
            wanted="weightprep, with what it needs, on every node",
            remedy="install the same version of weightprep on every node, and run the same command again",
        ) from error
    except RayError as error:
        raise CheckpointError(
            job.name,
            found=f"{_RETRIES + 1} workers that died at it ({type(error).__name__})",
            wanted="a worker that lives until the file is whole",
            remedy="look for the cause with `ray logs` (memory, most often), and run the same command again: it goes "
            "on where it stopped",
        ) from error
    return written


def _absolute(options: ConvertOptions) -> ConvertOptions:
    """The same options for a process in another directory."""
    recipe = options.recipe
    if recipe is not None and Path(recipe).is_file():
        recipe = str(Path(recipe).absolute())
    return dataclasses.replace(
        options, source=options.source.absolute(), destination=options.destination.absolute(), recipe=recipe
    )


class StopFile:
    """Stops the workers of a run through the file system that they share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self) -> None:
        """From now on."""
        self._path.touch()

    def clear(self) -> None:
        """No longer; nobody is at work."""
        self._path.unlink(missing_ok=True)

    def is_set(self) -> bool:
        """Whether the run is stopped, or its directory is gone."""
        return self._path.exists() or not self._path.parent.is_dir()


class _Unwritten:
    """In place of the journal on a worker: the driver writes the line."""

    def add(self, entry: Entry) -> None: ...


def _write(options: ConvertOptions, identity: str, name: str, run: str) -> _Written:
    """On a worker: write the file `name` of the conversion `identity`, unless or until `run` is stopped."""
    if identity_of(options.partial) != identity:
        raise CheckpointError(
            options.partial,
            found="nothing of this conversion on a worker's node",
            wanted="a file system that all nodes share",
            remedy="give paths that lead to the same directories on every node",
        )
    # One core is what Ray has set aside for a task.
    plan = _plan(dataclasses.replace(options, workers=1), identity)
    (job,) = (job for job in plan.jobs if job.name == name)
    # A name of its own for every attempt: a worker that was given up and lives on must not meet its successor's file.
    stop = StopFile(stop_file_of(options.partial, run))
    runner = FileRunner(plan, _Unwritten(), Unwatched(), attempt=uuid.uuid4().hex, stop=stop)
    runner.run([job])
    (placed,) = runner.placed
    return _Written(runner.entries[name], placed)


# The conversion that this worker process is at work on: a plan takes a look at every header of the source.
_plans: dict[str, ConversionPlan] = {}


def _plan(options: ConvertOptions, identity: str) -> ConversionPlan:
    """The plan as this node sees it: another source, recipe or version of weightprep is found here.

    :raises CheckpointError: it is not the driver's
    """
    if identity in _plans:
        return _plans[identity]
    plan = plan_contents(options)
    if plan.identity != identity:
        raise CheckpointError(
            options.source,
            found="another source, recipe or version of weightprep on a worker's node than on the driver's",
            wanted="the same on every node",
            remedy="share the file system, install one version everywhere, and give a recipe of your own as a file "
            "with --recipe",
        )
    _plans.clear()
    _plans[identity] = plan
    return plan


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
