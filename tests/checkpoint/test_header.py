"""Headers: what safetensors writes is read back, what is wrong is refused by name, what we write safetensors reads."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from raw_files import bf16, file_bytes
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from weightprep.checkpoint.dtypes import DTYPES
from weightprep.checkpoint.header import MAX_HEADER_BYTES, TensorInfo, encode_header, place, read_header
from weightprep.errors import CheckpointError


def test_reads_what_safetensors_writes(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4, dtype=torch.int64),
        "fp8": torch.zeros(3, 5).to(torch.float8_e4m3fn),
        "ünïcode.weight": torch.zeros(2, 2, dtype=torch.bfloat16),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.file_size == path.stat().st_size
    got = {name: (info.dtype, info.shape, info.nbytes) for name, info in header.tensors.items()}
    assert got == {
        "scalar": ("F32", (), 4),
        "empty": ("I64", (0, 4), 0),
        "fp8": ("F8_E4M3", (3, 5), 15),
        "ünïcode.weight": ("BF16", (2, 2), 8),
    }


def test_every_dtype_of_the_library_is_known(tmp_path):
    """The library's own parser judges our element sizes: a wrong one makes it refuse the file."""
    for name, element in DTYPES.items():
        path = tmp_path / f"{name}.safetensors"
        nbytes = 8 * element.bits // 8
        path.write_bytes(
            file_bytes({"t": {"dtype": name, "shape": [1, 8], "data_offsets": [0, nbytes]}}, bytes(nbytes))
        )
        with safe_open(path, "pt") as file:
            assert file.get_slice("t").get_dtype() == name
        assert read_header(path).tensors["t"].nbytes == nbytes


GOOD = {"a": bf16(0, 4, 2), "b": bf16(4, 8, 2)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "8-byte"),
        (b"\x01\x02\x03", "8-byte"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (struct.pack("<Q", 2**62) + b"{}", "header length"),
        (file_bytes(b"{}", length=100), "header length of 100"),
        (file_bytes(b"{}", length=MAX_HEADER_BYTES + 1), "at most 100000000"),
        (file_bytes(b" {}"), "does not start"),
        (file_bytes(b"[]"), "does not start"),
        (file_bytes(b'{"a":'), "not JSON"),
        (file_bytes(b'{"\xff":1}'), "UTF-8"),
        (file_bytes(rb'{"\ud800":{}}'), "UTF-8"),
        (file_bytes(b'{"a":' * 100_000), "nested too deeply"),
        (file_bytes(b'{"a":{"a":[' + b"[" * 100_000), "nested too deeply"),
        (file_bytes(b'{"a":%s,"a":%s}' % ((json.dumps(GOOD["a"]).encode(),) * 2), bytes(4)), "'a' twice"),
        (file_bytes(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1"), "'dtype' twice"),
        (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_bytes({"__metadata__": []}), "__metadata__"),
        (file_bytes({"": bf16(0, 4, 2)}, bytes(4)), "NUL"),
        (file_bytes({"a\0b": bf16(0, 4, 2)}, bytes(4)), "NUL"),
        (file_bytes({"a": 1}), "other fields"),
        (file_bytes({"a": {"dtype": "BF16", "shape": [2]}}), "other fields"),
        (file_bytes({"a": {**bf16(0, 4, 2), "more": 1}}, bytes(4)), "other fields"),
        (file_bytes({"a": {**bf16(0, 4, 2), "dtype": "bfloat16"}}, bytes(4)), "dtype 'bfloat16'"),
        (file_bytes({"a": {**bf16(0, 4, 2), "dtype": None}}, bytes(4)), "dtype 'None'"),
        (file_bytes({"a": {**bf16(0, 4, 2), "dtype": ["BF16"]}}, bytes(4)), "dtype"),
        (file_bytes({"a": bf16(0, 4, -2)}, bytes(4)), "shape"),
        (file_bytes({"a": {**bf16(0, 4), "shape": [2.0]}}, bytes(4)), "shape"),
        (file_bytes({"a": {**bf16(0, 4), "shape": [True, 2]}}, bytes(4)), "shape"),
        (file_bytes({"a": {**bf16(0, 4), "shape": [2**63]}}, bytes(4)), "shape"),
        (file_bytes({"a": {**bf16(0, 4), "shape": [1] * 100_000}}, bytes(4)), "shape"),
        (file_bytes({"a": {**bf16(0, 4), "shape": 2}}, bytes(4)), "shape"),
        (file_bytes({"a": {**bf16(0, 4, 2), "data_offsets": [4, 0]}}, bytes(4)), "data_offsets"),
        (file_bytes({"a": {**bf16(0, 4, 2), "data_offsets": [0, 4, 8]}}, bytes(4)), "data_offsets"),
        (file_bytes({"a": {**bf16(0, 4, 2), "data_offsets": [-4, 0]}}, bytes(4)), "data_offsets"),
        (file_bytes({"a": bf16(0, 4, 3)}, bytes(4)), "6 bytes for BF16"),
        (file_bytes({"a": bf16(0, 4, 2**40, 2**40)}, bytes(4)), "bytes for BF16"),
        (file_bytes({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3)), "whole bytes"),
        (file_bytes({"a": {"dtype": "F4", "shape": [], "data_offsets": [0, 0]}}), "whole bytes"),
        (file_bytes({"a": {"dtype": "F6_E2M3", "shape": [3], "data_offsets": [0, 2]}}, bytes(2)), "whole bytes"),
        (file_bytes({**GOOD, "c": bf16(6, 10, 2)}, bytes(10)), "overlaps"),
        (file_bytes({"a": bf16(0, 4, 2), "c": bf16(6, 10, 2)}, bytes(10)), "2 bytes unused"),
        (file_bytes({"a": bf16(2, 6, 2)}, bytes(6)), "2 bytes unused"),
        (file_bytes(GOOD, bytes(7)), "truncated"),
        (file_bytes(GOOD, bytes(9)), "follows the last tensor"),
    ],
)
def test_refuses(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_number_of_a_million_digits_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}', b"1"))
    with pytest.raises(CheckpointError):
        read_header(path)


def test_refuses_what_is_no_regular_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="regular file"):
        read_header(tmp_path)


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, math.prod(shape) * DTYPES[dtype].bits // 8)


def test_what_we_write_safetensors_reads(tmp_path):
    placed = place([info("b", "BF16", 3), info("a", "F32"), info("fp8", "F8_E4M3", 2, 2)])
    header = encode_header(placed, {"format": "pt", "a": "1"})
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(range(placed[-1].end)))
    assert len(header) % 8 == 0
    loaded = load_file(path)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items()} == {
        "a": (torch.float32, ()),
        "b": (torch.bfloat16, (3,)),
        "fp8": (torch.float8_e4m3fn, (2, 2)),
    }
    assert read_header(path).metadata == {"format": "pt", "a": "1"}


def test_header_bytes_do_not_depend_on_mapping_order():
    placed = place([info(f"t{i}", "F32", i) for i in range(5)])
    expected = encode_header(placed, {"x": "1", "y": "2"})
    assert encode_header(reversed(placed), {"y": "2", "x": "1"}) == expected


def test_place_keeps_the_order_unless_a_tensor_would_be_misaligned():
    aligned = [info("fp8", "F8_E4M3", 4), info("b", "BF16", 2), info("f", "F32", 1)]
    assert [t.name for t in place(aligned)] == ["fp8", "b", "f"]
    odd = [
        info("x", "U8", 1),
        info("fp8", "F8_E4M3", 2),
        info("b", "BF16", 1),
        info("c", "BF16", 1),
        info("f", "F32", 1),
    ]
    moved = place(odd)
    assert [t.name for t in moved] == ["f", "b", "c", "x", "fp8"]
    assert [(t.begin, t.end) for t in moved] == [(0, 4), (4, 6), (6, 8), (8, 9), (9, 11)]


def test_too_large_a_header_is_not_written():
    huge = TensorInfo("n" * (MAX_HEADER_BYTES + 1), "U8", (1,), 0, 1)
    with pytest.raises(CheckpointError, match="more shards"):
        encode_header([huge], {})
