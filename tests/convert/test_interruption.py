"""Conversions that are killed, interrupted, starved or disturbed: never a destination that only looks finished."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_hashes import hashes
from safetensors.torch import load_file
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.execute import Result, execute
from weightprep.convert.files import Unwatched
from weightprep.convert.journal import journaled_files
from weightprep.convert.options import ConvertOptions, Layout, LinkMode
from weightprep.convert.plan import ConversionPlan
from weightprep.convert.planner import make_plan
from weightprep.convert.remaining import finished_by
from weightprep.errors import CheckpointError, QualityError, WeightprepError
from weightprep.synth import synthesize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("source") / "src", shards=6)


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    destination = tmp_path_factory.mktemp("reference") / "dst"
    convert(source, destination, workers=1)
    return hashes(destination)


def options(source: Path, destination: Path, **changes: object) -> ConvertOptions:
    return ConvertOptions(source, destination, link=LinkMode.COPY, **changes)  # type: ignore[arg-type]


def convert(source: Path, destination: Path, **changes: object) -> Result:
    return execute(make_plan(options(source, destination, **changes)), Unwatched())


# Imports once and forks for every conversion, so that a kill hits the conversion and not the start of Python.
CHILD = """
import os, sys
from pathlib import Path
from typing import Any
from weightprep.convert.execute import execute
from weightprep.convert.options import ConvertOptions, LinkMode
from weightprep.convert.plan import ConversionPlan
from weightprep.convert.planner import make_plan
from weightprep.convert.remaining import finished_by
class Silent:
    def begin(self, *_): pass
    advance = end = begin
for line in sys.stdin:
    source, destination, workers = line.split()
    child = os.fork()
    if not child:
        plan = make_plan(ConvertOptions(Path(source), Path(destination), link=LinkMode.COPY, workers=int(workers)))
        print(os.getpid(), flush=True)
        execute(plan, Silent())
        os._exit(0)
    os.waitpid(child, 0)
    print("over", flush=True)
"""


class Forks:
    """Conversions in processes that can be killed."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def begin(self, source: Path, destination: Path, workers: int) -> int:
        """The process id of a conversion that has its plan and begins to execute it."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{source} {destination} {workers}\n")
        return int(self._parent.stdout.readline())

    def wait(self) -> None:
        """Wait for the conversion to end, in whatever way."""
        assert self._parent.stdout is not None
        assert self._parent.stdout.readline() == "over\n"

    def close(self) -> None:
        self._parent.communicate()


@pytest.fixture
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def test_forty_kills_then_resume_gives_the_same_bytes(
    source: Path, tmp_path: Path, reference: dict[str, str], forks: Forks
) -> None:
    forks.begin(source, tmp_path / "timed", 2)
    began = time.monotonic()
    forks.wait()
    whole = time.monotonic() - began

    moments = random.Random(0)
    destination = tmp_path / "dst"
    resumed = 0
    for number in range(40):
        if destination.exists():
            # it came through before the kill: complete then, and another conversion begins
            assert hashes(destination) == reference
            destination = tmp_path / f"dst{number}"
        resumed += any(destination.with_name(f"{destination.name}.partial").glob("files/*.safetensors"))
        victim = forks.begin(source, destination, 1 + number % 3)
        time.sleep(moments.uniform(0, whole))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        forks.wait()
        # the load of the machine changes meanwhile, and kills have to come neither too early nor too late
        whole *= 0.7 if destination.exists() else 1.1
    if not destination.exists():
        convert(source, destination, workers=2)

    assert hashes(destination) == reference
    # otherwise every kill came before the first file was finished
    assert resumed > 5


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_same_bytes_for_any_number_of_workers(
    source: Path, tmp_path: Path, reference: dict[str, str], workers: int
) -> None:
    convert(source, tmp_path / "dst", workers=workers)
    assert hashes(tmp_path / "dst") == reference


def test_interrupt_is_130_and_resumable(source: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    for number in range(20):
        destination, partial = tmp_path / f"dst{number}", tmp_path / f"dst{number}.partial"
        command = [sys.executable, "-m", "weightprep", "convert", str(source), str(destination), "--link", "copy"]
        child = subprocess.Popen(
            [*command, "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while not partial.exists() and not destination.exists() and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
        if not destination.exists():
            break
        # it came through before the signal, as it may on a busy machine: complete then, and another one begins
        assert hashes(destination) == reference

    assert not destination.exists()
    assert child.returncode == 130, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert hashes(destination) == reference


def failing(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    code: int,
    number: int,
    counted: Callable[[tuple[object, ...]], bool],
) -> list[int]:
    """Let the `number`-th counted call of any of these functions of `os` fail, in this and every later call."""
    calls = [0]
    for name in names:
        real = getattr(os, name)

        def call(*args: object, _real: Callable[..., object] = real, **kwargs: object) -> object:
            if counted(args):
                calls[0] += 1
                if calls[0] >= number:
                    raise OSError(code, os.strerror(code))
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    return calls


WRITES = ["pwrite", "write", "copy_file_range", "sendfile", "fsync", "link", "rename", "replace"]


def remedy_of(source: Path, destination: Path) -> str | None:
    """Convert, and return what an error says to do."""
    try:
        convert(source, destination, workers=1)
    except WeightprepError as error:
        return error.remedy
    return None


def test_no_space_from_any_write_on_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of a conversion in turn is the first that finds the disk full; then there is room again."""
    source = synthesize(tmp_path / "src", layers=1, shards=2)
    with monkeypatch.context() as patch:
        total = failing(patch, WRITES, errno.ENOSPC, 10**9, lambda _: True)
        convert(source, tmp_path / "counted", workers=1)
    assert total[0] > 40
    wanted = hashes(tmp_path / "counted")

    refused = 0
    for number in range(1, total[0] + 1):
        destination = tmp_path / f"dst{number}"
        with monkeypatch.context() as patch:
            failing(patch, WRITES, errno.ENOSPC, number, lambda _: True)
            remedy = remedy_of(source, destination)
        refused += remedy is not None
        assert remedy is None or re.search("run the (same )?command again", remedy)
        assert not destination.exists() or hashes(destination) == wanted
        if not destination.exists():
            convert(source, destination, workers=1)
        assert hashes(destination) == wanted
        assert not destination.with_name(f"{destination.name}.partial").exists()
        shutil.rmtree(destination)
    # what comes after the last rename is no part of the result, and too late to refuse it
    assert total[0] - refused <= 2


def test_full_disk(source: Path, tmp_path: Path) -> None:
    """On a real file system without space: refused before the first byte of a weight is written."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here; the check of the free space is not tried on a real file system")
    try:
        result = CliRunner().invoke(app, ["convert", str(source), str(mount / "dst")])
        assert result.exit_code == 2
        assert "bytes free" in result.stderr
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 60 MB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=60m", "none", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here; a disk that fills up during the run is only injected, not tried")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_disk_that_fills_up_during_the_run(
    source: Path, small_disk: Path, reference: dict[str, str], workers: int
) -> None:
    """Somebody else takes the space that was free when it was checked."""
    destination, ballast = small_disk / "dst", small_disk / "ballast"

    class Meanwhile(Unwatched):
        def end(self, file: str) -> None:
            with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as taken:
                while True:
                    taken.write(bytes(2**16))

    with pytest.raises(CheckpointError, match="No space left on device") as error:
        execute(make_plan(options(source, destination, workers=workers)), Meanwhile())
    assert re.search("run the (same )?command again", error.value.remedy)
    assert not destination.exists()
    finished = [path.name for path in (small_disk / "dst.partial" / "files").iterdir()]
    assert finished

    ballast.unlink()
    result = CliRunner().invoke(app, ["convert", str(source), str(destination), "--link", "copy", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["resumed_files"] >= 1
    assert hashes(destination) == reference


def test_every_file_is_on_the_disk_before_it_gets_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the calls themselves: fsync of a file, rename to its name, fsync of the directory, its line, fsync of that."""
    synced: set[int] = set()
    renamed: list[str] = []
    journaled: list[str] = []
    fsync, replace, rename, write = os.fsync, os.replace, os.rename, os.write
    partial = tmp_path / "dst.partial"

    def record_fsync(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    def record_replace(old: Path, new: Path) -> None:
        assert Path(old).stat().st_ino in synced, new
        replace(old, new)
        # only what is synced after the rename makes the name durable
        synced.discard(Path(new).parent.stat().st_ino)
        renamed.append(Path(new).name)

    def record_write(fd: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name.startswith("journal-"):
            name = json.loads(data)["file"]
            assert name in renamed
            assert (partial / "files").stat().st_ino in synced
            journaled.append(name)
        return write(fd, data)

    def record_rename(old: Path, new: Path) -> None:
        if Path(new) == tmp_path / "dst":
            assert all(Path(path).stat().st_ino in synced for path in (partial / "files").iterdir())
            assert (partial / "files").stat().st_ino in synced
            # everything but shards comes after every shard is journaled, the manifest last
            assert renamed[-1] == "weightprep.json"
            assert set(renamed[: len(journaled)]) == set(journaled)
            synced.discard(tmp_path.stat().st_ino)
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "write", record_write)
    convert(source, tmp_path / "dst", workers=1)
    assert len(journaled) == 6
    assert tmp_path.stat().st_ino in synced


def test_people_can_read_plan_and_journal(source: Path, tmp_path: Path) -> None:
    class Interrupted(Unwatched):
        def end(self, file: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(make_plan(options(source, tmp_path / "dst", workers=1)), Interrupted())

    text = (tmp_path / "dst.partial" / "plan.json").read_text()
    plan = json.loads(text)
    assert text.count("\n") >= len(plan)
    assert (plan["source"], plan["destination"]) == (str(source), str(tmp_path / "dst"))
    (line,) = (tmp_path / "dst.partial" / "journal-1-of-1.jsonl").read_text().splitlines()
    entry = json.loads(line)
    finished = tmp_path / "dst.partial" / "files" / entry["file"]
    assert finished.stat().st_size == entry["bytes"]
    assert [module["module"] for module in entry["modules"]] == [
        name.removesuffix(".weight") for name in load_file(finished) if name.endswith("kv_b_proj.weight")
    ]


@pytest.mark.parametrize("call", ["copy_file_range", "preadv"])
def test_read_error_is_resumable(
    source: Path, tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    finished = tmp_path / "dst.partial" / "files"
    with monkeypatch.context() as patch:
        failing(patch, [call], errno.EIO, 1, lambda _: any(finished.glob("*.safetensors")))
        with pytest.raises(WeightprepError, match="Input/output error"):
            convert(source, tmp_path / "dst", workers=1)
    assert not (tmp_path / "dst").exists()
    assert convert(source, tmp_path / "dst", workers=1).resumed > 0
    assert hashes(tmp_path / "dst") == reference


def test_nothing_finished_is_thrown_away_whatever_failed(
    tmp_path: Path, source: Path, reference: dict[str, str]
) -> None:
    """A source that goes away for a moment; a worker of a cluster that reports a full disk fails the same way."""

    class Unmount(Unwatched):
        def end(self, file: str) -> None:
            if there.exists():
                there.rename(away)

    there, away = tmp_path / "src", tmp_path / "away"
    shutil.copytree(source, there)
    with pytest.raises(CheckpointError):
        execute(make_plan(ConvertOptions(there, tmp_path / "dst", link=LinkMode.COPY, workers=1)), Unmount())
    away.rename(there)
    assert convert(there, tmp_path / "dst", workers=1).resumed == 1
    assert hashes(tmp_path / "dst") == reference


def test_a_waived_floor_goes_on_with_what_is_converted(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", shards=2)
    recipe = tmp_path / "strict.yaml"
    text = (Path(__file__).parents[2] / "configs" / "glm_moe_dsa.yaml").read_text()
    recipe.write_text(text.replace("name: glm_moe_dsa", "name: strict").replace("min_sqnr_db: 28", "min_sqnr_db: 99"))
    with pytest.raises(QualityError, match="of its worst head"):
        convert(source, tmp_path / "dst", recipe=str(recipe))
    result = convert(source, tmp_path / "dst", recipe=str(recipe), allow_quality_loss=True)
    assert result.resumed == 2
    assert (tmp_path / "dst").is_dir()


@pytest.mark.parametrize(
    "line",
    [
        '{"file": 5, "bytes": 1, "modules": []}',
        '{"file": [], "bytes": 1, "modules": []}',
        '{"file": "\\u0000", "bytes": 1, "modules": []}',
        '{"file": "\\ud800", "bytes": 1, "modules": []}',
        "[" * 100_000,
        "no JSON",
    ],
)
def test_a_strangers_line_in_the_journal_finishes_nothing(tmp_path: Path, line: str) -> None:
    (tmp_path / "journal-1-of-1.jsonl").write_text(line + "\n")
    assert journaled_files(tmp_path) == {}


def test_file_systems_without_copy_in_the_kernel(
    source: Path, tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ["copy_file_range", "sendfile"], errno.EXDEV, 1, lambda _: True)
    convert(source, tmp_path / "dst", workers=1)
    assert hashes(tmp_path / "dst") == reference


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def grow(path: Path) -> None:
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def edit_header(path: Path) -> None:
    status = path.stat()
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"format":"pt"', b'"format":"np"', 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, grow, edit_header, Path.unlink])
def test_source_that_changes_after_the_plan(tmp_path: Path, change: Callable[[Path], None]) -> None:
    source = synthesize(tmp_path / "src", shards=3)
    plan = make_plan(options(source, tmp_path / "dst", workers=2))
    change(source / "model-00002-of-00003.safetensors")

    with pytest.raises(CheckpointError, match="what the plan was made from"):
        execute(plan, Unwatched())

    assert not (tmp_path / "dst").exists()


def test_source_that_changes_between_two_runs(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", shards=3)

    class Interrupted(Unwatched):
        def end(self, file: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(make_plan(options(source, tmp_path / "dst", workers=1)), Interrupted())
    touch(source / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="before its source changed"):
        convert(source, tmp_path / "dst")
    convert(source, tmp_path / "dst", overwrite=True)
    assert CliRunner().invoke(app, ["verify", str(source), str(tmp_path / "dst")]).exit_code == 0


def test_second_conversion_into_one_destination_is_refused(source: Path, tmp_path: Path) -> None:
    first = make_plan(options(source, tmp_path / "dst", workers=1))
    second = make_plan(options(source, tmp_path / "dst", workers=1))
    other = make_plan(options(source, tmp_path / "dst", workers=1, nextn="keep", overwrite=True))
    refused = []

    class Meanwhile(Unwatched):
        def end(self, file: str) -> None:
            for plan in (second, other):
                with pytest.raises(CheckpointError) as error:
                    execute(plan, Unwatched())
                refused.append(error.value.found)

    execute(first, Meanwhile())

    assert set(refused) == {"another process that is writing into it"}
    assert (tmp_path / "dst" / "config.json").exists()


def rename_tensor(header: dict[str, Any]) -> None:
    name = next(name for name in header if name.endswith("weight"))
    header[name.replace("weight", "thgiew")] = header.pop(name)


def rename_key(header: dict[str, Any]) -> None:
    metadata = header["__metadata__"]
    metadata["tamrof"] = metadata.pop("format")


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header at `path` and keep its size, and that of the file; a file of its own, if it was a link."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    assert text != raw[8 : 8 + length]
    path.unlink()
    path.write_bytes(raw[:8] + text + raw[8 + length :])


@pytest.mark.parametrize("change", [rename_tensor, rename_key])
@pytest.mark.parametrize(
    ("layout", "link"),
    [(Layout.INLINE, LinkMode.COPY), (Layout.INLINE, LinkMode.HARD), (Layout.SIDECAR, LinkMode.COPY)],
)
def test_a_finished_file_with_another_header_is_written_again(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], layout: Layout, link: LinkMode
) -> None:
    """A rewritten shard, or a sidecar, and a whole one; the header has the planned size and is not the planned one."""
    source = synthesize(tmp_path / "src", layers=2, shards=10)

    def planned(name: str) -> ConversionPlan:
        return make_plan(ConvertOptions(source, tmp_path / name, link=link, layout=layout, workers=1))

    class AtEnd(Unwatched):
        def end(self, file: str) -> None:
            if len(finished_by(plan)) == len(plan.jobs):
                raise KeyboardInterrupt

    execute(planned("uninterrupted"), Unwatched())
    plan = planned("dst")
    with pytest.raises(KeyboardInterrupt):
        execute(plan, AtEnd())
    changed = {next(job.name for job in plan.jobs if job.rewritten is rewritten) for rewritten in (True, False)}
    for name in changed:
        change_header(tmp_path / "dst.partial" / "files" / name, change)

    assert set(finished_by(plan)) == {job.name for job in plan.jobs} - changed
    assert execute(planned("dst"), Unwatched()).resumed == len(plan.jobs) - 2
    assert hashes(tmp_path / "dst") == hashes(tmp_path / "uninterrupted")


def test_a_part_whose_file_was_changed_is_missing_at_the_end(source: Path, tmp_path: Path) -> None:
    base = ["convert", str(source), str(tmp_path / "dst"), "--link", "copy"]
    for part in ("1/2", "2/2"):
        assert CliRunner().invoke(app, [*base, "--part", part]).exit_code == 0
    change_header(min((tmp_path / "dst.partial" / "files").iterdir()), rename_key)
    done = CliRunner().invoke(app, [*base, "--finish"])
    assert done.exit_code == 2
    assert "1 of 6 files not done" in done.stderr
    assert CliRunner().invoke(app, [*base, "--part", "1/2"]).exit_code == 0
    assert CliRunner().invoke(app, [*base, "--finish"]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", str(source), str(tmp_path / "dst")]).exit_code == 0


class Counted(Unwatched):
    """Progress that counts the files that were begun."""

    def __init__(self) -> None:
        self.begun = 0

    def begin(self, file: str, nbytes: int) -> None:
        self.begun += 1


def test_a_run_that_was_planned_before_another_ended_does_nothing_again(
    source: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    first, second = (make_plan(options(source, tmp_path / "dst")) for _ in range(2))
    execute(first, Unwatched())

    counted = Counted()
    with pytest.raises(CheckpointError, match="files in it"):
        execute(second, counted)

    assert counted.begun == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    assert hashes(tmp_path / "dst") == reference


def test_what_came_to_the_destination_after_the_plan_costs_no_finished_file(source: Path, tmp_path: Path) -> None:
    class Interrupted(Unwatched):
        def end(self, file: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(make_plan(options(source, tmp_path / "dst", workers=1)), Interrupted())
    plan, counted = make_plan(options(source, tmp_path / "dst", workers=1)), Counted()
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="files in it"):
        execute(plan, counted)
    assert counted.begun == 0
    (tmp_path / "dst" / "notes.txt").unlink()
    assert execute(plan, counted).resumed == 1


def test_parts_of_a_job_array(source: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    base = ["convert", str(source), str(tmp_path / "dst"), "--link", "copy"]

    def run(*flags: str) -> int:
        return CliRunner().invoke(app, [*base, *flags]).exit_code

    assert run("--finish") == 2
    assert run("--part", "2/3") == 0
    assert run("--finish") == 2
    assert run("--part", "1/2") == 2
    assert run("--part", "3/3") == 0
    assert run("--part", "1/3") == 0
    assert not (tmp_path / "dst").exists()
    assert run("--finish") == 0
    assert hashes(tmp_path / "dst") == reference


class TestLinks:
    def test_hard_links_share_the_inode_and_rewritten_shards_do_not(self, tmp_path: Path) -> None:
        source = synthesize(tmp_path / "src", shards=10)
        convert_linked(source, tmp_path / "dst", LinkMode.HARD)
        shared = [path.name for path in source.glob("*.safetensors") if path.samefile(tmp_path / "dst" / path.name)]
        assert 0 < len(shared) < 10
        assert not (source / "config.json").samefile(tmp_path / "dst" / "config.json")
        assert not (source / "README.md").samefile(tmp_path / "dst" / "README.md")

    def test_overwriting_a_linked_result_leaves_the_source_alone(self, tmp_path: Path) -> None:
        source = synthesize(tmp_path / "src", shards=10)
        before = hashes(source)
        convert_linked(source, tmp_path / "dst", LinkMode.HARD)
        convert_linked(source, tmp_path / "dst", LinkMode.COPY, overwrite=True)
        assert hashes(source) == before
        assert not any(path.samefile(tmp_path / "dst" / path.name) for path in source.glob("*.safetensors"))

    def test_reflink_where_there_are_none_is_refused(self, tmp_path: Path) -> None:
        source = synthesize(tmp_path / "src", shards=10)
        with contextlib.suppress(CheckpointError):
            convert_linked(source, tmp_path / "dst", LinkMode.REFLINK)
        assert [path.name for path in tmp_path.iterdir()] in (["src"], ["src", "dst"], ["dst", "src"])

    def test_snapshot_of_a_hub_cache(self, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "main"
        synthesize(blobs, shards=10)
        snapshot.mkdir(parents=True)
        for blob in blobs.iterdir():
            (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
        convert_linked(snapshot, tmp_path / "dst", LinkMode.AUTO)
        assert not any(path.is_symlink() for path in (tmp_path / "dst").iterdir())
        assert CliRunner().invoke(app, ["verify", str(snapshot), str(tmp_path / "dst")]).exit_code == 0


def convert_linked(source: Path, destination: Path, link: LinkMode, *, overwrite: bool = False) -> None:
    chosen = ConvertOptions(source, destination, link=link, overwrite=overwrite, layout=Layout.INLINE)
    execute(make_plan(chosen), Unwatched())
