"""Conversions by a real Ray cluster of two workers: killed ones change no byte."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_hashes import hashes
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.files import FileRunner, StoppedError, Unwatched
from weightprep.convert.options import ConvertOptions, LinkMode
from weightprep.convert.partial import make_directories, stop_file_of
from weightprep.convert.planner import make_plan
from weightprep.convert.ray_executor import StopFile
from weightprep.synth import synthesize

# No statistics to anyone, and no token file in the home directory.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
WEIGHTPREP = [sys.executable, "-m", "weightprep"]
# Not a measure of speed: what takes this long hangs, on a machine with other work as well.
DEADLINE = 600.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Shards that take long enough to be written for a kill to hit one.
    return synthesize(tmp_path_factory.mktemp("source") / "src", shards=6, size=100_000_000)


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    destination = tmp_path_factory.mktemp("reference") / "dst"
    arguments = ["convert", str(source), str(destination), "--link", "copy", "--workers", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return hashes(destination)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster that lives as long as its process's standard input."""
    for _ in range(3):
        folder = tempfile.mkdtemp(prefix="ray-")
        # Ray notes the address in a folder that nothing makes where no cluster was ever started with the defaults.
        Path(folder, "ray").mkdir()
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | QUIET | {"RAY_TMPDIR": folder},
        )
        assert process.stdout is not None
        if address := process.stdout.readline().strip():
            break
        # Ray gives its processes a short time to come up, which a machine with other work may not keep
        errors = process.communicate()[1]
        shutil.rmtree(folder, ignore_errors=True)
    else:
        pytest.fail(f"no cluster: {errors[-2000:]}")
    yield address
    process.communicate()
    shutil.rmtree(folder, ignore_errors=True)


def begin(source: Path, destination: Path, cluster: str, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WEIGHTPREP, "convert", str(source), str(destination), "--link", "copy", "--executor", "ray", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | QUIET | {"RAY_ADDRESS": cluster},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=DEADLINE)
    return process.returncode, out, errors


def writer_of_an_unfinished_file(partial: Path) -> tuple[int, Path] | None:
    """A Ray worker that has a file in `unfinished/` open, and the file."""
    for process in Path("/proc").iterdir():
        try:
            if not process.name.isdecimal() or not (process / "cmdline").read_bytes().startswith(b"ray::"):
                continue
            for descriptor in (process / "fd").iterdir():
                path = descriptor.readlink()
                if path.is_relative_to(partial / "unfinished"):
                    return int(process.name), path
        except OSError:
            # it ended, or it closed the file, while we looked
            continue
    return None


def test_a_killed_worker_changes_no_byte(source: Path, tmp_path: Path, reference: dict[str, str], cluster: str) -> None:
    for number in range(5):
        destination = tmp_path / f"dst{number}"
        conversion = begin(source, destination, cluster, "--json")
        partial = tmp_path / f"dst{number}.partial"
        hit = False
        while not hit and conversion.poll() is None:
            time.sleep(0.001)
            found = writer_of_an_unfinished_file(partial)
            if found is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                # Held, so that it cannot come to the rename that finishes the file between the look and the kill: a
                # worker is given up after a few kills of any kind.
                os.kill(found[0], signal.SIGSTOP)
                hit = found[1].exists()
                os.kill(found[0], signal.SIGKILL if hit else signal.SIGCONT)
        code, out, errors = finish(conversion)
        assert code == 0, errors
        document = json.loads(out)
        assert document["state"] == "done"
        assert sum(document["placed"].values()) == 6
        assert hashes(destination) == reference
        assert not partial.exists()
        if hit:
            break
    assert hit, "no kill hit a worker while it wrote"


def test_a_local_run_goes_on_where_the_cluster_stopped(
    source: Path, tmp_path: Path, reference: dict[str, str], cluster: str
) -> None:
    for number in range(5):
        destination = tmp_path / f"dst{number}"
        conversion = begin(source, destination, cluster, "--workers", "1")
        journal = tmp_path / f"dst{number}.partial" / "journal-1-of-1.jsonl"
        while conversion.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n")):
            time.sleep(0.002)
        conversion.kill()
        finish(conversion)
        if not destination.exists() and journal.read_bytes().count(b"\n") < 6:
            break

    arguments = [str(source), str(destination), "--link", "copy", "--json"]
    done = subprocess.run([*WEIGHTPREP, "convert", *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert 1 <= json.loads(done.stdout)["resumed_files"] < 6
    assert hashes(destination) == reference


def test_an_interrupt_is_130_and_the_cluster_goes_on_where_it_stopped(
    source: Path, tmp_path: Path, reference: dict[str, str], cluster: str
) -> None:
    for number in range(5):
        destination, partial = tmp_path / f"dst{number}", tmp_path / f"dst{number}.partial"
        conversion = begin(source, destination, cluster, "--workers", "1")
        while conversion.poll() is None and writer_of_an_unfinished_file(partial) is None:
            time.sleep(0.002)
        conversion.send_signal(signal.SIGINT)
        code, _, errors = finish(conversion)
        if not destination.exists():
            break
        # it came through before the signal: complete then, and another one begins
        assert hashes(destination) == reference

    assert code == 130, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    assert not destination.exists()
    code, _, errors = finish(begin(source, destination, cluster))
    assert code == 0, errors
    assert hashes(destination) == reference


def test_an_error_on_a_worker_is_the_users_error_here(tmp_path: Path, cluster: str) -> None:
    source = synthesize(tmp_path / "src", shards=1)
    (path,) = source.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})

    code, out, errors = finish(begin(source, tmp_path / "dst", cluster, "--json"))

    assert code == 2, errors
    error = json.loads(out)["error"]
    assert (error["type"], error["subject"]) == ("CheckpointError", name)
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_cluster_that_does_not_answer(source: Path, tmp_path: Path) -> None:
    code, _, errors = finish(begin(source, tmp_path / "dst", "127.0.0.2:1"))
    assert code == 2, errors
    assert "no Ray cluster that answers" in errors
    assert "ray start --head" in errors
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra(source: Path, tmp_path: Path) -> None:
    script = "import sys; sys.modules['ray'] = None; from weightprep.cli import app; app()"
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--executor", "ray"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'weightprep[ray]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


class _Forgotten:
    def add(self, entry: object) -> None:
        pass


@pytest.mark.parametrize("when", ["before", "within a file", "its directory is gone"])
def test_a_worker_leaves_off_when_its_run_is_stopped(source: Path, tmp_path: Path, when: str) -> None:
    plan = make_plan(ConvertOptions(source, tmp_path / "dst", link=LinkMode.COPY, workers=1))
    partial = plan.options.partial
    make_directories(partial)
    stop = StopFile(stop_file_of(partial, "run"))
    copied: list[int] = []

    class Watch(Unwatched):
        def advance(self, file: str, nbytes: int) -> None:
            copied.append(nbytes)
            if when == "within a file":
                stop.set()

    if when == "before":
        stop.set()
    elif when == "its directory is gone":
        shutil.rmtree(partial / "unfinished")
    runner = FileRunner(plan, _Forgotten(), Watch(), stop=StopFile(stop_file_of(partial, "run")))
    with pytest.raises(StoppedError):
        runner.run([job for job in plan.jobs if job.rewritten][:1])
    assert len(copied) == (when == "within a file")
    assert runner.entries == {}
    assert [path for path in partial.rglob("*") if path.is_file() and path != stop_file_of(partial, "run")] == []

    stop.clear()
    make_directories(partial)
    FileRunner(plan, _Forgotten(), Unwatched(), stop=stop).run(plan.jobs)
