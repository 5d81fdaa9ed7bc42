"""Shards: the same bytes by every way of copying and in every order, nothing finished that is incomplete, small
memory.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from weightprep.checkpoint import copying
from weightprep.checkpoint.copying import CopyMethod, copy_range
from weightprep.checkpoint.header import read_header
from weightprep.checkpoint.repository import Checkpoint
from weightprep.checkpoint.writer import ShardWriter, describe
from weightprep.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    """A source shard of ten tensors of odd and even lengths, in two dtypes."""
    root = tmp_path / "source"
    root.mkdir()
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(3 + i, 7).to(torch.bfloat16) for i in range(8)}
    tensors["bytes"] = torch.randint(0, 256, (11,), dtype=torch.uint8)
    tensors["f32"] = torch.randn(5)
    save_file(tensors, root / "model.safetensors")
    (root / "config.json").write_text("{}")
    return Checkpoint.open(root)


def write_copy(checkpoint: Checkpoint, path: Path, methods, replaced: dict[str, torch.Tensor], order) -> bytes:
    infos = [
        describe(name, replaced[name].dtype, replaced[name].shape) if name in replaced else ref.info
        for name, ref in checkpoint.tensors.items()
    ]
    with ShardWriter(path, infos, {"format": "pt"}, methods=methods) as writer:
        for name in order:
            if name in replaced:
                writer.write(name, replaced[name])
            else:
                writer.copy([checkpoint.tensors[name]])
        writer.finish()
    return path.read_bytes()


@pytest.mark.parametrize("method", list(CopyMethod))
def test_each_method_alone_gives_the_same_bytes(checkpoint, tmp_path, method):
    """On this platform all three work; the source and the result are compared by the safetensors library."""
    path = tmp_path / "copy.safetensors"
    infos = [ref.info for ref in checkpoint.tensors.values()]
    with ShardWriter(path, infos, {}, methods=(method,)) as writer:
        writer.copy(checkpoint.tensors.values())
        writer.finish()
    source, copy = load_file(checkpoint.root / "model.safetensors"), load_file(path)
    assert source.keys() == copy.keys()
    assert all(torch.equal(source[name], copy[name]) for name in source)


def test_bytes_do_not_depend_on_the_order_of_writing(checkpoint, tmp_path):
    replaced = {"t3": torch.randn(6, 7).to(torch.float8_e4m3fn)}
    names = list(checkpoint.tensors)
    expected = write_copy(checkpoint, tmp_path / "0", (CopyMethod.BUFFERED,), replaced, names)
    for number in range(1, 6):
        random.Random(number).shuffle(names)
        assert write_copy(checkpoint, tmp_path / str(number), tuple(CopyMethod), replaced, names) == expected
    source, result = load_file(checkpoint.root / "model.safetensors"), load_file(tmp_path / "0")
    assert torch.equal(result.pop("t3").view(torch.uint8), replaced["t3"].view(torch.uint8))
    assert all(torch.equal(source[name], result[name]) for name in result)


def test_order_of_the_source_is_kept(checkpoint, tmp_path):
    write_copy(checkpoint, tmp_path / "copy", tuple(CopyMethod), {}, checkpoint.tensors)
    assert list(read_header(tmp_path / "copy").tensors) == list(checkpoint.tensors)


def test_neighbours_are_copied_in_one_range(checkpoint, tmp_path, monkeypatch):
    calls = []
    real = copying.copy_range

    def counted(*args, **options):
        calls.append(options["nbytes"])
        return real(*args, **options)

    monkeypatch.setattr("weightprep.checkpoint.writer.copy_range", counted)
    refs = list(checkpoint.tensors.values())
    with ShardWriter(tmp_path / "copy", [ref.info for ref in refs], {}) as writer:
        writer.copy(refs[:4] + refs[5:])
        writer.copy(refs[4:5])
        writer.finish()
    assert calls == [sum(r.nbytes for r in refs[:4]), sum(r.nbytes for r in refs[5:]), refs[4].nbytes]


def test_neighbours_that_are_parted_in_the_result(checkpoint, tmp_path):
    """The result has the tensors the other way round; they arrive in the order of the source."""
    refs = list(checkpoint.tensors.values())
    with ShardWriter(tmp_path / "copy", [ref.info for ref in reversed(refs)], {}) as writer:
        writer.copy(refs)
        writer.finish()
    source, copy = load_file(checkpoint.root / "model.safetensors"), load_file(tmp_path / "copy")
    assert list(read_header(tmp_path / "copy").tensors) != list(checkpoint.tensors)
    assert all(torch.equal(source[name], copy[name]) for name in source)


def unsupported(error: int):
    def step(*_: int) -> int:
        raise OSError(error, os.strerror(error))

    return step


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL])
def test_falls_back_where_the_platform_refuses(tmp_path, monkeypatch, error):
    monkeypatch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, unsupported(error))
    monkeypatch.setitem(copying._STEPS, CopyMethod.SENDFILE, unsupported(error))
    assert copy_of(tmp_path, b"0123456789") == (CopyMethod.BUFFERED, b"2345678")


def test_falls_back_from_a_method_that_stops_in_the_middle(tmp_path, monkeypatch):
    """Three bytes, then nothing: the next method continues where the first stopped."""
    real = copying._STEPS[CopyMethod.COPY_FILE_RANGE]

    def three_bytes(source: int, target: int, source_offset: int, target_offset: int, nbytes: int) -> int:
        return real(source, target, source_offset, target_offset, 3) if target_offset == 0 else 0

    monkeypatch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, three_bytes)
    assert copy_of(tmp_path, b"0123456789") == (CopyMethod.SENDFILE, b"2345678")


def test_no_fallback_from_a_real_error(tmp_path, monkeypatch):
    monkeypatch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, unsupported(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        copy_of(tmp_path, b"0123456789")


def test_a_full_disk_is_a_clear_error(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(copying._STEPS, CopyMethod.COPY_FILE_RANGE, unsupported(errno.ENOSPC))
    infos = [ref.info for ref in checkpoint.tensors.values()]
    with (
        ShardWriter(tmp_path / "copy", infos, {}) as writer,
        pytest.raises(CheckpointError, match="No space left") as caught,
    ):
        writer.copy(checkpoint.tensors.values())
    assert isinstance(caught.value.__cause__, OSError)


def test_the_last_method_has_no_fallback(tmp_path, monkeypatch):
    monkeypatch.setitem(copying._STEPS, CopyMethod.BUFFERED, unsupported(errno.EINVAL))
    with pytest.raises(OSError, match="Invalid"):
        copy_of(tmp_path, b"0123456789", (CopyMethod.BUFFERED,))


def test_source_that_ends_too_early(tmp_path):
    with pytest.raises(EOFError):
        copy_of(tmp_path, b"01234")


def copy_of(tmp_path: Path, content: bytes, methods=tuple(CopyMethod)) -> tuple[CopyMethod, bytes]:
    (tmp_path / "in").write_bytes(content)
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("w+b") as target:
        method = copy_range(
            source.fileno(), target.fileno(), source_offset=2, target_offset=0, nbytes=7, methods=methods
        )
    return method, (tmp_path / "out").read_bytes()


def test_progress_counts_every_byte(checkpoint, tmp_path):
    seen: list[int] = []
    infos = [ref.info for ref in checkpoint.tensors.values()]
    with ShardWriter(tmp_path / "copy", infos, {}, on_bytes=seen.append) as writer:
        writer.copy(ref for name, ref in checkpoint.tensors.items() if name != "f32")
        writer.write("f32", torch.zeros(5))
        writer.finish()
    assert sum(seen) == sum(ref.nbytes for ref in checkpoint.tensors.values())


def test_what_is_incomplete_or_wrong_is_not_finished(checkpoint, tmp_path):
    refs = checkpoint.tensors
    with ShardWriter(tmp_path / "copy", [refs["t0"].info, refs["f32"].info], {}) as writer:
        with pytest.raises(CheckpointError, match="2 tensor"):
            writer.finish()
        with pytest.raises(CheckpointError, match="not planned"):
            writer.copy([refs["t1"]])
        with pytest.raises(CheckpointError, match="F32"):
            writer.write("f32", torch.zeros(6))
        writer.write("f32", torch.zeros(5))
        with pytest.raises(CheckpointError, match="written twice"):
            writer.write("f32", torch.zeros(5))
        with pytest.raises(CheckpointError, match="'t0' first"):
            writer.finish()


def slices_of(data: bytes, *lengths: int):
    view = np.frombuffer(data, dtype=np.uint8)
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return (view[stop - length : stop] for stop, length in zip(stops, lengths, strict=True))


def test_slices_are_the_tensor_between_its_neighbours(checkpoint, tmp_path):
    """Empty slices and one of a single byte; they are counted, and those after them land behind them."""
    refs, seen = checkpoint.tensors, []
    data = bytes(range(11))
    with ShardWriter(
        tmp_path / "copy", [refs[name].info for name in ("t0", "bytes", "f32")], {}, on_bytes=seen.append
    ) as writer:
        writer.write_slices("bytes", slices_of(data, 0, 4, 1, 0, 6))
        writer.copy([refs["t0"], refs["f32"]])
        writer.finish()
    source, result = load_file(checkpoint.root / "model.safetensors"), load_file(tmp_path / "copy")
    assert bytes(result["bytes"].numpy()) == data
    assert torch.equal(result["t0"], source["t0"])
    assert torch.equal(result["f32"], source["f32"])
    assert sum(seen) == sum(refs[name].nbytes for name in ("t0", "bytes", "f32"))


@pytest.mark.parametrize(
    ("lengths", "found"),
    [((5, 5), "10 bytes for 'bytes'"), ((), "0 bytes for 'bytes'"), ((5, 6, 1), "more than 11 bytes for 'bytes'")],
    ids=["too short", "none", "too long"],
)
def test_slices_of_another_length_are_refused(checkpoint, tmp_path, lengths, found):
    """What is too long is refused before it reaches the tensor behind it, and neither counts as written."""
    refs = checkpoint.tensors
    with ShardWriter(tmp_path / "copy", [refs["bytes"].info, refs["f32"].info], {}) as writer:
        writer.copy([refs["f32"]])
        with pytest.raises(CheckpointError, match=found):
            writer.write_slices("bytes", slices_of(bytes(range(100, 112)), *lengths))
        with pytest.raises(CheckpointError, match=r"1 tensor.*'bytes' first"):
            writer.finish()
        writer.write_slices("bytes", slices_of(bytes(11), 11))
        writer.finish()
    source, result = load_file(checkpoint.root / "model.safetensors"), load_file(tmp_path / "copy")
    assert not result["bytes"].any()
    assert torch.equal(result["f32"], source["f32"])


def test_slices_of_a_name_that_is_not_planned_or_was_written(checkpoint, tmp_path):
    def never():
        raise AssertionError("asked for slices that have no place")
        yield

    with ShardWriter(tmp_path / "copy", [checkpoint.tensors["bytes"].info], {}) as writer:
        with pytest.raises(CheckpointError, match="'t1' not planned"):
            writer.write_slices("t1", never())
        writer.write_slices("bytes", slices_of(bytes(11), 11))
        for again in (writer.write_slices, lambda name, _: writer.copy([checkpoint.tensors[name]])):
            with pytest.raises(CheckpointError, match="'bytes' written twice"):
                again("bytes", never())


def test_slices_that_end_in_an_error_are_not_written(checkpoint, tmp_path):
    def broken():
        yield np.zeros(11, dtype=np.uint8)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ShardWriter(tmp_path / "copy", [checkpoint.tensors["bytes"].info], {}) as writer:
        with pytest.raises(OSError, match="Input/output"):
            writer.write_slices("bytes", broken())
        with pytest.raises(CheckpointError, match="1 tensor"):
            writer.finish()


def test_a_full_disk_under_slices_is_a_clear_error(checkpoint, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ShardWriter(tmp_path / "copy", [checkpoint.tensors["bytes"].info], {}) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            writer.write_slices("bytes", slices_of(bytes(11), 11))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_write_that_takes_only_a_part_goes_on(checkpoint, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    with ShardWriter(tmp_path / "copy", [checkpoint.tensors["bytes"].info], {}) as writer:
        writer.write_slices("bytes", slices_of(bytes(range(11)), 7, 4))
        writer.finish()
    assert bytes(load_file(tmp_path / "copy")["bytes"].numpy()) == bytes(range(11))


def test_an_existing_file_is_never_overwritten(checkpoint, tmp_path):
    (tmp_path / "copy").write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"):
        ShardWriter(tmp_path / "copy", [], {})
    assert (tmp_path / "copy").read_text() == "mine"


def test_copy_must_keep_dtype_and_shape(checkpoint, tmp_path):
    other = describe("f32", torch.int32, (5,))
    with ShardWriter(tmp_path / "copy", [other], {}) as writer, pytest.raises(CheckpointError, match="I32"):
        writer.copy([checkpoint.tensors["f32"]])


def test_packed_fp4_and_e8m0_keep_their_names(tmp_path):
    packed, scale = torch.arange(32, dtype=torch.uint8).view(2, 16), torch.full((2, 1), 127, dtype=torch.uint8)
    infos = [
        describe("w", packed.dtype, packed.shape, as_dtype="F4"),
        describe("s", scale.dtype, scale.shape, as_dtype="F8_E8M0"),
    ]
    with ShardWriter(tmp_path / "model.safetensors", infos, {}) as writer:
        writer.write("w", packed)
        writer.write("s", scale)
        writer.finish()
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded["w"].dtype is torch.float4_e2m1fn_x2
    assert loaded["s"].dtype is torch.float8_e8m0fnu
    assert torch.equal(loaded["w"].view(torch.uint8), packed)
    assert loaded["s"].float().tolist() == [[1.0], [1.0]]


MEMORY = """
import resource, sys
from pathlib import Path
from weightprep.checkpoint.copying import CopyMethod
from weightprep.checkpoint.repository import Checkpoint
from weightprep.checkpoint.writer import ShardWriter
checkpoint = Checkpoint.open(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for method in CopyMethod:
    path = Path(sys.argv[1] + method.value)
    with ShardWriter(path, [r.info for r in checkpoint.tensors.values()], {}, methods=(method,)) as writer:
        writer.copy(checkpoint.tensors.values())
        writer.finish()
    path.unlink()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_follow_the_shard(tmp_path):
    """A sparse 600 MB shard is copied by each method; the process may not grow by a tenth of it."""
    root = tmp_path / "source"
    root.mkdir()
    infos = [describe(f"t{i}", torch.uint8, (200_000_000,)) for i in range(3)]
    with ShardWriter(root / "model.safetensors", infos, {}) as writer:
        os.truncate(writer.path, writer.path.stat().st_size + 600_000_000)
    (root / "config.json").write_text("{}")
    done = subprocess.run([sys.executable, "-c", MEMORY, str(root)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 60_000_000
