"""Tensors by byte range, whole or in slices: the bytes that the header speaks of, or an error that names the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightprep.checkpoint.reader import read_slices, read_tensor
from weightprep.checkpoint.repository import Checkpoint, TensorRef
from weightprep.errors import CheckpointError

DATA = bytes(range(1, 101))


@pytest.fixture
def ref(tmp_path: Path) -> TensorRef:
    """A hundred different bytes between two tensors of 0xff."""
    edge = torch.full((16,), 0xFF, dtype=torch.uint8)
    tensors = {"a": edge, "b": torch.frombuffer(bytearray(DATA), dtype=torch.uint8), "c": edge.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return Checkpoint.open(tmp_path).tensors["b"]


@pytest.mark.parametrize("stops", [[100], [1, 100], [40, 80, 100], [99, 100], list(range(1, 101)), [50, 50, 100], [7]])
def test_slices_end_where_they_were_asked_to(ref: TensorRef, stops: list[int]) -> None:
    slices = [bytes(part) for part in read_slices(ref, stops)]
    assert slices == [DATA[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def test_memory_is_that_of_the_longest_slice(ref: TensorRef) -> None:
    """The next slice takes the place of the one before."""
    slices = read_slices(ref, [30, 60, 100])
    first = next(slices)
    assert bytes(first) == DATA[:30]
    next(slices)
    assert bytes(first) == DATA[30:60]
    assert len(first.obj) == 40


def test_whole_tensors_do_not_share_memory(ref: TensorRef) -> None:
    one, other = read_tensor(ref), read_tensor(ref)
    other.zero_()
    assert bytes(one.numpy()) == DATA


def test_a_short_read_goes_on(ref: TensorRef, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:7]], offset))
    assert [bytes(part) for part in read_slices(ref, [50, 100])] == [DATA[:50], DATA[50:]]


@pytest.mark.parametrize("left", [0, 49, 50, 99])
def test_a_file_that_became_shorter_is_refused_at_the_slice_that_is_not_there(ref: TensorRef, left: int) -> None:
    os.truncate(ref.path, ref.offset + left)
    slices = read_slices(ref, [50, 100])
    if left >= 50:
        assert bytes(next(slices)) == DATA[:50]
    with pytest.raises(CheckpointError, match="end of the file inside tensor 'b'") as caught:
        next(slices)
    assert caught.value.subject == str(ref.path)
    with pytest.raises(CheckpointError, match="end of the file inside tensor 'b'"):
        read_tensor(ref)


def test_a_file_that_becomes_shorter_between_two_slices(ref: TensorRef) -> None:
    slices = read_slices(ref, [50, 100])
    assert bytes(next(slices)) == DATA[:50]
    os.truncate(ref.path, ref.offset + 99)
    with pytest.raises(CheckpointError, match="end of the file inside tensor 'b'"):
        next(slices)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("how", ["to the end", "given up", "shorter", "a read error"])
def test_no_descriptor_is_left(ref: TensorRef, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_files()
    slices = read_slices(ref, [50, 100])
    next(slices)
    assert open_files() == before + 1
    if how == "to the end":
        assert len(list(slices)) == 1
    elif how == "given up":
        slices.close()  # type: ignore[attr-defined]
    elif how == "shorter":
        os.truncate(ref.path, ref.offset)
        with pytest.raises(CheckpointError, match="end of the file"):
            next(slices)
    else:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            next(slices)
    assert open_files() == before


def test_a_file_that_is_gone(ref: TensorRef) -> None:
    ref.path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        next(read_slices(ref, [100]))
