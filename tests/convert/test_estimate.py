"""What a dry run says of a conversion that was begun is what the next run does, and a source must be whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.estimate import estimate
from weightprep.convert.execute import execute
from weightprep.convert.files import Unwatched
from weightprep.convert.options import ConvertOptions, LinkMode, Part
from weightprep.convert.plan import ConversionPlan
from weightprep.convert.planner import make_plan
from weightprep.convert.remaining import finished_by, left_to_write, needed_bytes, space
from weightprep.synth import synthesize


class Stopped(Unwatched):
    """An interrupt after the second file."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def end(self, file: str) -> None:
        self.files.append(file)
        if len(self.files) == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("source") / "src", layers=2, shards=5)


def planned(source: Path, destination: Path, **changes: object) -> ConversionPlan:
    return make_plan(ConvertOptions(source, destination, **{"link": LinkMode.COPY, "workers": 1, **changes}))  # type: ignore[arg-type]


def interrupt(plan: ConversionPlan) -> list[str]:
    stopped = Stopped()
    with pytest.raises(KeyboardInterrupt):
        execute(plan, stopped)
    return stopped.files


def dry_run(source: Path, destination: Path, *flags: str) -> dict[str, object]:
    arguments = ["convert", str(source), str(destination), "--link", "copy", "--dry-run", "--json", *flags]
    document: dict[str, object] = json.loads(CliRunner().invoke(app, arguments).stdout)
    return document


@pytest.mark.parametrize("flags", [[], ["--overwrite"]], ids=["again", "with --overwrite"])
def test_a_dry_run_of_an_interrupted_conversion_tells_what_is_left(
    source: Path, tmp_path: Path, flags: list[str]
) -> None:
    """--overwrite goes on with what is the same conversion as well; it replaces what is at the destination."""
    destination = tmp_path / "dst"
    before = dry_run(source, destination, *flags)
    names = interrupt(planned(source, destination))
    done = sum((tmp_path / "dst.partial" / "files" / name).stat().st_size for name in names)
    assert done > 0

    after = dry_run(source, destination, *flags)
    assert (before["resumed_files"], after["resumed_files"]) == (0, 2)
    assert after["needed_bytes"] == before["needed_bytes"] - done  # type: ignore[operator]
    assert after["estimate"]["nbytes"] == before["estimate"]["nbytes"] - done  # type: ignore[index]
    said = CliRunner().invoke(app, ["convert", str(source), str(destination), "--link", "copy", "--dry-run", *flags])
    assert "goes on where an earlier run stopped: 2 of 5 file(s) are finished" in said.stdout

    made = CliRunner().invoke(app, ["convert", str(source), str(destination), "--link", "copy", "--json", *flags])
    document = json.loads(made.stdout)
    assert (document["state"], document["resumed_files"]) == ("done", 2)
    assert document["needed_bytes"] == after["needed_bytes"]


@pytest.mark.parametrize(
    "other",
    [{"nextn": "keep"}, {"link": LinkMode.HARD}, {"part": Part(1, 2)}],
    ids=["another conversion", "other links", "in parts"],
)
def test_what_another_conversion_left_counts_for_nothing(
    source: Path, tmp_path: Path, other: dict[str, object]
) -> None:
    interrupt(planned(source, tmp_path / "dst"))
    plan = planned(source, tmp_path / "dst", **other)
    assert finished_by(plan) == {}
    assert len(finished_by(planned(source, tmp_path / "dst"))) == 2


def test_parts_count_their_own_files_and_everybodys_space(source: Path, tmp_path: Path) -> None:
    execute(planned(source, tmp_path / "dst", part=Part(1, 2)), Unwatched())
    done = {path.name: path.stat().st_size for path in (tmp_path / "dst.partial" / "files").iterdir()}
    sizes = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}

    first, second = (planned(source, tmp_path / "dst", part=Part(index, 2)) for index in (1, 2))
    for plan in (first, second):
        assert {name: entry.nbytes for name, entry in finished_by(plan).items()} == done
    assert left_to_write(first, done) == 0
    assert left_to_write(second, done) == sum(job.nbytes for job in second.jobs) - sum(done.values())
    assert len(done) == 3
    assert len(sizes) == 5
    assert needed_bytes(first, done) == needed_bytes(second, done) == needed_bytes(first, ()) - sum(done.values())
    assert dry_run(source, tmp_path / "dst", "--part", "1/2")["resumed_files"] == 3
    assert dry_run(source, tmp_path / "dst", "--part", "2/2")["resumed_files"] == 0

    execute(second, Unwatched())
    last = dry_run(source, tmp_path / "dst", "--finish")
    assert last["resumed_files"] == 5
    # small files alone, and 16 MiB that stay free
    assert 2**24 < last["needed_bytes"] < 2**24 + 2**20  # type: ignore[operator]


def test_what_is_linked_takes_no_space(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, shards=12)
    linked, copied = (planned(source, tmp_path / "dst", link=link) for link in (LinkMode.HARD, LinkMode.COPY))
    whole = sum(job.nbytes for job in copied.jobs if not job.rewritten)
    assert whole > 0
    assert needed_bytes(linked, ()) == needed_bytes(copied, ()) - whole
    room = space(linked, ())
    assert room.wanted == needed_bytes(linked, ()) + 2**24
    assert room.suffices


def test_none_of_a_shard_that_ends_early(tmp_path: Path) -> None:
    plan = make_plan(ConvertOptions(synthesize(tmp_path / "src", layers=2, shards=1), tmp_path / "dst"))
    for header in plan.checkpoint.shards.values():
        os.truncate(header.path, header.file_size // 2)
    assert estimate(plan, ()) is None
