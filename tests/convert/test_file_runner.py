"""The threads of one run: modules beside the copy of their shard change no byte, and whatever fails ends the others."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from weightprep.checkpoint import copying
from weightprep.checkpoint.copying import CopyMethod
from weightprep.convert import files
from weightprep.convert.execute import execute
from weightprep.convert.files import FileRunner, Unwatched
from weightprep.convert.journal import Entry
from weightprep.convert.options import ConvertOptions, LinkMode, Part
from weightprep.convert.partial import make_directories
from weightprep.convert.plan import ConversionPlan, ShardJob
from weightprep.convert.planner import make_plan
from weightprep.errors import CheckpointError
from weightprep.synth import synthesize

SHARD = "model.safetensors"
MODULES = 7
# Not a measure of speed: what waits this long waits for ever.
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard with seven modules and everything else."""
    return synthesize(tmp_path_factory.mktemp("source") / "src", layers=MODULES - 1, shards=1)


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    destination = tmp_path_factory.mktemp("reference") / "dst"
    execute(planned(source, destination, 1), Unwatched())
    return hashes(destination)


# What went on although it should have been given up: an error in a thread may be hidden by the one that is awaited.
outlasted: list[str] = []


@pytest.fixture(autouse=True)
def nothing_is_left_at_work() -> Iterator[None]:
    before = set(threading.enumerate())
    outlasted.clear()
    yield
    assert set(threading.enumerate()) <= before
    assert outlasted == []


def planned(source: Path, destination: Path, workers: int, **changes: object) -> ConversionPlan:
    return make_plan(ConvertOptions(source, destination, link=LinkMode.COPY, workers=workers, **changes))  # type: ignore[arg-type]


def hashes(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def unfinished(destination: Path) -> list[Path]:
    return list((destination.with_name(destination.name + ".partial") / "unfinished").glob("*"))


def unsupported(*_: int) -> int:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize("method", list(CopyMethod))
@pytest.mark.parametrize("workers", [2, 8])
def test_one_shard_of_many_modules_has_the_same_bytes(
    source: Path,
    tmp_path: Path,
    reference: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    method: CopyMethod,
) -> None:
    """By every way of copying: sendfile moves the descriptor's position, which the modules may not write at."""
    for other in CopyMethod:
        if other is not method:
            monkeypatch.setitem(copying._STEPS, other, unsupported)
    if method is CopyMethod.BUFFERED:
        monkeypatch.setattr(copying, "_BUFFER_BYTES", 2**12)
    execute(planned(source, tmp_path / "dst", workers), Unwatched())
    assert hashes(tmp_path / "dst") == reference


def test_modules_are_written_while_the_rest_is_copied(
    source: Path, tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy waits for two modules at once, which a run of one after the other never has."""
    together = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    first_modules = itertools.count()
    real_module, real_copy = files.convert_by_table, copying._STEPS[CopyMethod.COPY_FILE_RANGE]
    copies = itertools.count()

    def module(*args: object) -> object:
        if next(first_modules) < 2:
            together.wait()
        return real_module(*args)  # type: ignore[arg-type]

    def copy(*args: int) -> int:
        if next(copies) == 0:
            together.wait()
        return real_copy(*args)

    monkeypatch.setattr(files, "convert_by_table", module)
    monkeypatch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, copy)
    execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert hashes(tmp_path / "dst") == reference


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("layer", [0, MODULES - 1])
def test_a_module_that_cannot_be_converted_is_named(source: Path, tmp_path: Path, workers: int, layer: int) -> None:
    name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
    tensors = load_file(source / SHARD)
    tensors[name].view(-1)[-1] = float("nan")
    spoiled = tmp_path / "src"
    spoiled.mkdir()
    save_file(tensors, spoiled / SHARD, metadata={"format": "pt"})
    (spoiled / "config.json").write_bytes((source / "config.json").read_bytes())

    with pytest.raises(CheckpointError, match="a NaN or an infinity") as caught:
        execute(planned(spoiled, tmp_path / "dst", workers), Unwatched())
    assert caught.value.subject == name
    # a source with bad values makes what was done worth nothing
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def until_given_up(deadline: float) -> Iterator[np.ndarray]:
    """Slices without end, for a module that is at work for as long as nobody stops it."""
    while time.monotonic() < deadline:
        time.sleep(0.001)
        yield np.empty(0, dtype=np.uint8)
    outlasted.append("a module")


Write = Callable[[str, Iterable[np.ndarray]], None]


def test_an_error_in_the_copy_ends_modules_that_are_at_work(
    source: Path, tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = threading.Barrier(3, timeout=PATIENCE_SECONDS)

    def endless(job: object, dims: object, file: str, write: Write) -> None:
        at_work.wait()
        try:
            write(job.outputs["weight"].name, until_given_up(time.monotonic() + PATIENCE_SECONDS))  # type: ignore[attr-defined]
        finally:
            # a slice takes a while; what it writes into must not be closed, and its number another file's, by then
            time.sleep(0.2)
            writer = write.__self__  # type: ignore[attr-defined]
            if writer._fd < 0:
                outlasted.append("a module its writer")

    def broken(*_: int) -> int:
        at_work.wait()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(files, "convert_by_table", endless)
        patch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert unfinished(tmp_path / "dst") == []
    execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert hashes(tmp_path / "dst") == reference


def test_an_error_in_one_module_ends_the_others_and_the_copy(
    source: Path, tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module reads from a bad disk while another one and the copy, byte by byte, are at work."""
    at_work = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    numbers = itertools.count()
    real = copying._STEPS[CopyMethod.COPY_FILE_RANGE]
    steps = itertools.count()

    def module(job: object, dims: object, file: str, write: Write) -> None:
        number = next(numbers)
        if number > 1:
            outlasted.append("a module that had not begun")
        at_work.wait()
        if number == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "weights")
        write(job.outputs["weight"].name, until_given_up(time.monotonic() + PATIENCE_SECONDS))  # type: ignore[attr-defined]

    def byte(source: int, target: int, source_offset: int, target_offset: int, nbytes: int) -> int:
        step = next(steps)
        if step == 0:
            at_work.wait()
        time.sleep(0.001)
        if step > PATIENCE_SECONDS / 0.001:
            outlasted.append("the copy")
            raise OSError
        return real(source, target, source_offset, target_offset, 1)

    with monkeypatch.context() as patch:
        patch.setattr(files, "convert_by_table", module)
        patch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, byte)
        with pytest.raises(CheckpointError, match="Input/output error") as caught:
            execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert caught.value.subject == "weights"
    assert unfinished(tmp_path / "dst") == []
    execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert hashes(tmp_path / "dst") == reference


def test_an_interrupt_while_modules_are_at_work(
    source: Path, tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    numbers = itertools.count()

    def module(job: object, dims: object, file: str, write: Write) -> None:
        if next(numbers) == 1:
            signal.pthread_kill(main, signal.SIGINT)
        write(job.outputs["weight"].name, until_given_up(time.monotonic() + PATIENCE_SECONDS))  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(files, "convert_by_table", module)
        with pytest.raises(KeyboardInterrupt):
            execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert next(numbers) == 2
    assert not (tmp_path / "dst").exists()
    assert unfinished(tmp_path / "dst") == []
    execute(planned(source, tmp_path / "dst", 2), Unwatched())
    assert hashes(tmp_path / "dst") == reference


class Told:
    """A journal that only listens."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def add(self, entry: Entry) -> None:
        self.files.append(entry.file)


def test_an_interrupt_while_files_are_handed_out(tmp_path: Path) -> None:
    plan = planned(synthesize(tmp_path / "src", shards=3), tmp_path / "dst", 2)
    make_directories(plan.options.partial)

    class Late(Unwatched):
        def begin(self, file: str, nbytes: int) -> None:
            if not runner._stop.wait(PATIENCE_SECONDS):
                outlasted.append(file)

    class Interrupted(Sequence[ShardJob]):
        def __len__(self) -> int:
            return len(plan.jobs)

        def __getitem__(self, index: int) -> ShardJob:  # type: ignore[override]
            if index == 2:
                raise KeyboardInterrupt
            return plan.jobs[index]

    journal = Told()
    runner = FileRunner(plan, journal, Late())
    with pytest.raises(KeyboardInterrupt):
        runner.run(Interrupted())
    assert journal.files == []
    assert unfinished(tmp_path / "dst") == []


def test_files_that_had_not_begun_stay_so_after_a_failure(tmp_path: Path) -> None:
    """Of 24 files the first fails; those that wait for a thread, or for their turn, never begin."""
    plan = planned(synthesize(tmp_path / "src", shards=24), tmp_path / "dst", 2)
    begun: list[str] = []
    full = threading.Event()

    class Failing(Unwatched):
        def begin(self, file: str, nbytes: int) -> None:
            begun.append(file)
            if len(begun) == 2:
                full.set()
            assert full.wait(PATIENCE_SECONDS)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left"):
        execute(plan, Failing())
    # the two whose turn it was
    assert len(begun) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_changes_while_it_is_read_leaves_no_file(tmp_path: Path, workers: int) -> None:
    """Parts of a job array keep each other's work, so the file of this one is not removed with all the rest."""
    source = synthesize(tmp_path / "src", shards=2)

    class Meanwhile(Unwatched):
        def advance(self, file: str, nbytes: int) -> None:
            os.utime(source / file, ns=(0, 1))

    plan = planned(source, tmp_path / "dst", workers, part=Part(1, 2))
    with pytest.raises(CheckpointError, match="what the plan was made from"):
        execute(plan, Meanwhile())
    assert unfinished(tmp_path / "dst") == []
    assert list((tmp_path / "dst.partial" / "files").iterdir()) == []
