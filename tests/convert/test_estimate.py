"""The estimate before a conversion: of what is left to write, and none of a source that cannot be read to its end."""

from __future__ import annotations

import os
from pathlib import Path

from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.estimate import estimate
from weightprep.convert.execute import needed_bytes
from weightprep.convert.options import ConvertOptions, LinkMode
from weightprep.convert.planner import make_plan
from weightprep.synth import synthesize


def test_files_that_are_done_are_not_written_again(tmp_path: Path) -> None:
    source, destination = synthesize(tmp_path / "src", layers=2, shards=3), tmp_path / "dst"
    arguments = ["convert", str(source), str(destination), "--link", "copy", "--part", "1/2"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    done = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors") if source not in path.parents)
    assert done > 0

    plan = make_plan(ConvertOptions(source, destination, link=LinkMode.COPY))
    left = estimate(plan)
    assert left is not None
    assert left.nbytes == needed_bytes(plan) - done

    again = estimate(make_plan(ConvertOptions(source, destination, link=LinkMode.COPY, overwrite=True)))
    assert again is not None
    assert again.nbytes == needed_bytes(plan)


def test_none_of_a_shard_that_ends_early(tmp_path: Path) -> None:
    plan = make_plan(ConvertOptions(synthesize(tmp_path / "src", layers=2, shards=1), tmp_path / "dst"))
    for header in plan.checkpoint.shards.values():
        os.truncate(header.path, header.file_size // 2)
    assert estimate(plan) is None
