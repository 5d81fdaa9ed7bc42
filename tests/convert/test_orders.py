"""The order of keys in JSON that somebody wrote decides nothing: not in headers, nor in index, config and options."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.synth import synthesize

INDEX = "model.safetensors.index.json"
# encoding of the source, and what else a conversion of it needs
CASES = {"bf16": [], "fp8_block": ["--requantize"], "mxfp4_experts": []}


def reordered(value: Any) -> Any:
    """The same JSON with the keys of every object the other way round; the order of a list means something."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def reorder_header(path: Path) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(reordered(header), separators=(",", ":")).encode()
    assert text.rstrip() != data[8 : 8 + length].rstrip()
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


def reorder_json(path: Path) -> None:
    path.write_text(json.dumps(reordered(json.loads(path.read_text()))))


def headers(root: Path) -> None:
    for path in root.glob("*.safetensors"):
        reorder_header(path)


def index(root: Path) -> None:
    reorder_json(root / INDEX)


def config(root: Path) -> None:
    reorder_json(root / "config.json")


def everything(root: Path) -> None:
    headers(root)
    index(root)
    config(root)


def made(root: Path, name: str, encoding: str, change: Callable[[Path], None] | None, *flags: str) -> Path:
    source = synthesize(root / name / "src", layers=2, shards=8, encoding=encoding)
    if change is not None:
        change(source)
    arguments = ["convert", str(source), str(root / name / "dst"), "--link", "copy", *CASES[encoding], *flags]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    return root / name / "dst"


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*.safetensors")}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("encoding", "change"),
    [("bf16", headers), ("bf16", index), ("bf16", config), ("fp8_block", everything), ("mxfp4_experts", everything)],
)
def test_the_order_of_keys_changes_no_tensor_and_no_record(
    tmp_path: Path, encoding: str, change: Callable[[Path], None]
) -> None:
    one = made(tmp_path, "one", encoding, None)
    other = made(tmp_path, "other", encoding, change)

    assert (other / "weightprep.json").read_bytes() == (one / "weightprep.json").read_bytes()
    untouched = {name for name, data in shards(tmp_path / "one" / "src").items() if shards(one)[name] == data}
    assert 0 < len(untouched) < 8
    for name, data in shards(other).items():
        # what is copied whole keeps the bytes of its source, whose header has them in that order
        assert data == (shards(tmp_path / "other" / "src") if name in untouched else shards(one))[name]
    for name in (INDEX, "config.json"):
        texts = [(root / name).read_text() for root in (one, other)]
        first, second = map(json.loads, texts)
        assert first == second
        reads_it = {headers: (), index: (INDEX,), config: ("config.json",), everything: (INDEX, "config.json")}[change]
        assert (texts[0] == texts[1]) == (name not in reads_it)
    arguments = ["verify", str(tmp_path / "other" / "src"), str(other)]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_the_order_of_options_changes_nothing(tmp_path: Path) -> None:
    sidecar = ("--layout", "sidecar")
    one = made(tmp_path, "one", "bf16", None, *sidecar, "--precision", "decoder=fp8,nextn=mxfp4")
    other = made(tmp_path, "other", "bf16", None, *sidecar, "--precision", "nextn=mxfp4,decoder=fp8")
    assert json.loads((one / "weightprep.json").read_text())["precision"] == {"decoder": "fp8", "nextn": "mxfp4"}
    files = [
        {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()} for root in (one, other)
    ]
    assert files[0] == files[1]


def test_empty_tensors_at_one_offset_go_by_name(tmp_path: Path) -> None:
    """They have no bytes that could tell their order, and the exclude list has one."""
    excluded = []
    for number, order in enumerate((("b", "a"), ("a", "b"))):
        source = synthesize(tmp_path / str(number), layers=2, shards=1)
        path = source / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        empty = {"dtype": "BF16", "shape": [0, 4], "data_offsets": [0, 0]}
        header = {f"model.{name}.weight": empty for name in order} | header
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        destination = tmp_path / f"dst{number}"
        done = CliRunner().invoke(app, ["convert", str(source), str(destination)])
        assert done.exit_code == 0, done.stderr
        excluded.append((destination / "config.json").read_bytes())
    assert b"model.a" in excluded[0]
    assert excluded[0] == excluded[1]
