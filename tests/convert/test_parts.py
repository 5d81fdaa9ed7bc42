"""A conversion in parts says what each part did and, to whoever goes on differently, which parts are left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert import finished
from weightprep.convert.journal import claim
from weightprep.convert.options import ConvertOptions
from weightprep.convert.planner import make_plan
from weightprep.synth import synthesize


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two shards with two kv_b_proj each."""
    synthesize(tmp_path / "src", layers=3, shards=2)
    return tmp_path


def convert(root: Path, *options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["convert", str(root / "src"), str(root / "dst"), *options])
    return done.exit_code, done.stdout, done.stderr


def test_each_part_counts_its_own_modules(root: Path) -> None:
    counts = []
    for part in ("1/2", "2/2"):
        code, out, _ = convert(root, "--part", part)
        assert code == 0
        assert out.startswith("part done: ")
        counts.append(int(out.removeprefix("part done: ").split()[0]))
    # three decoder layers and the NextN layer
    assert sum(counts) == 4
    assert min(counts) > 0
    code, out, _ = convert(root, "--finish")
    assert code == 0
    assert ": 4 module(s) converted" in out


@pytest.mark.parametrize("options", [(), ("--part", "2/3")])
def test_going_on_in_another_number_of_parts(root: Path, options: tuple[str, ...]) -> None:
    convert(root, "--part", "1/2")
    code, _, message = convert(root, *options)
    assert code == 2
    assert "found a conversion in 2 parts (1/2 done)" in message
    assert "run --part 2/2, then --finish" in message
    # what it tells to do works
    assert convert(root, "--part", "2/2")[0] == 0
    code, _, message = convert(root, *options)
    assert code == 2
    assert "(2/2 done)" in message
    assert "run --finish" in message
    assert convert(root, "--finish")[0] == 0


def test_parts_of_what_was_begun_without_them(root: Path) -> None:
    options = ConvertOptions(root / "src", root / "dst")
    claim(options, make_plan(options).identity, 1, {})
    code, _, message = convert(root, "--part", "1/2")
    assert code == 2
    assert "found this conversion without --part" in message
    assert "run it without --part" in message
    assert convert(root)[0] == 0


def test_overwrite_begins_again(root: Path) -> None:
    convert(root, "--part", "1/2")
    code, out, _ = convert(root, "--overwrite")
    assert code == 0
    assert ": 4 module(s) converted" in out


@pytest.mark.parametrize("name", ["a\u2028b\x85c\x1cd.safetensors", "模型\x9b1m\u202e.safetensors"])
def test_a_shard_of_any_name_is_found_finished(tmp_path: Path, name: str) -> None:
    """Other ends of a line than the journal's own, and what a terminal would act on."""
    source = synthesize(tmp_path / "src", layers=1, shards=1)
    (source / "model.safetensors").rename(source / name)
    assert convert(tmp_path, "--part", "1/1")[0] == 0
    (line,) = (tmp_path / "dst.partial" / "journal-1-of-1.jsonl").read_text().splitlines()
    assert line.isascii()
    assert json.loads(line)["file"] == name
    code, _, message = convert(tmp_path, "--finish")
    assert code == 0, message
    assert (tmp_path / "dst" / name).exists()


def test_what_stays_after_a_failure_is_told(root: Path) -> None:
    shard = sorted((root / "src").glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight"))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    code, _, message = convert(root, "--part", "2/2")
    assert code == 2
    assert name in message
    # of nothing finished nothing stays to be told of
    assert "are finished and stay" not in message

    assert convert(root, "--part", "1/2")[0] == 0
    code, _, message = convert(root, "--part", "2/2")
    assert code == 2
    assert name in message
    assert f"{root / 'dst.partial'}: 1 of 2 file(s) are finished and stay" in message


def test_what_is_told_of_beginning_again_is_so(root: Path) -> None:
    """--overwrite goes on with the same conversion's partial result; without the directory nothing is left of it."""
    shard = max((root / "src").glob("*.safetensors"))
    sound = shard.read_bytes()
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight"))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    message = convert(root, "--workers", "1")[2]
    assert "the same command goes on from there; to begin again, remove that directory" in message
    again = convert(root, "--workers", "1", "--overwrite")[2]
    assert "1 of 2 file(s) are finished and stay" in message
    assert "1 of 2 file(s) are finished and stay" in again

    shard.write_bytes(sound)
    shutil.rmtree(root / "dst.partial")
    _, out, _ = convert(root, "--json")
    assert json.loads(out)["resumed_files"] == 0


def test_finishing_what_was_begun_without_parts_says_what_to_do(root: Path) -> None:
    shard = sorted((root / "src").glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight"))
    sound = tensors[name].clone()
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    convert(root, "--workers", "1")
    code, _, message = convert(root, "--finish")
    assert code == 2
    assert "run the same command without --finish" in message
    assert "the same command goes on" not in message
    save_file(tensors | {name: sound}, shard, metadata={"format": "pt"})
    assert convert(root, "--overwrite")[0] == 0


def test_a_finished_file_that_cannot_be_read_just_now_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = sorted((root / "src").glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("kv_b_proj.weight"))
    save_file(tensors | {name: tensors[name] * float("nan")}, shard, metadata={"format": "pt"})
    convert(root, "--workers", "1")
    (kept,) = (root / "dst.partial" / "files").glob("*.safetensors")

    def unreadable(path: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(finished, "open_regular", unreadable)
    assert convert(root, "--workers", "1")[0] == 2
    assert kept.exists()
