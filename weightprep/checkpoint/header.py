"""The safetensors header, read as hostile input, written deterministically: all else trusts the offsets checked here.

A file is an 8-byte little-endian length, that many bytes of JSON, then the data. After `read_header` the tensors
cover the data exactly: no gap, no overlap, no byte beyond the file, and every length follows from dtype and shape.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from weightprep.checkpoint.dtypes import DTYPES
from weightprep.checkpoint.json_file import open_regular, parse_object, unreadable
from weightprep.errors import CheckpointError

__all__ = [
    "MAX_HEADER_BYTES",
    "Header",
    "TensorInfo",
    "encode_header",
    "json_length",
    "parse_header",
    "place",
    "read_header",
]

# The limit of the safetensors library itself: what it refuses to read must not be written, and needs not be read.
MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 32
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a header.

    :param dtype: the safetensors string
    :param shape: as in the header: logical, so F4 counts values and not bytes
    :param begin: first byte in the data section
    :param end: one past its last byte in the data section
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    :param tensors: by name, in the order of their bytes in the file
    :param data_start: absolute offset of the data section
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`; reads nothing of the data.

    :raises CheckpointError: the file is no complete, self-consistent safetensors file
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        start = os.pread(fd, len(_LFS_POINTER), 0)
        length = json_length(start, size, path)
        raw = os.pread(fd, length, 8)
    except OSError as error:
        raise unreadable(path, error) from None
    finally:
        os.close(fd)
    return parse_header(start[:8] + raw, size, path)


def json_length(start: bytes, file_size: int, path: Path) -> int:
    """The length of the JSON part, checked before anything of that length is read.

    :param start: the file's first bytes, enough of them to recognise a Git LFS pointer where it is one
    :raises CheckpointError: it is no length of a header inside the file
    """
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(
            path,
            found="a Git LFS pointer, not the weights",
            wanted="a safetensors file",
            remedy="run `git lfs pull` in the checkpoint, or download it with `hf download`",
        )
    if len(start) < 8:
        _refuse(path, f"a file of {file_size} bytes", "at least an 8-byte header length")
    (length,) = struct.unpack("<Q", start[:8])
    if length > MAX_HEADER_BYTES:
        _refuse(path, f"a header length of {length} bytes", f"at most {MAX_HEADER_BYTES}")
    if 8 + length > file_size:
        _refuse(path, f"a header length of {length} bytes in a file of {file_size}", "a header inside the file")
    return int(length)


def parse_header(raw: bytes, file_size: int, path: Path) -> Header:
    """Check the first bytes of a safetensors file (the 8-byte length and the whole JSON part).

    :param raw: starts at the file's first byte; more than the header is allowed and ignored
    :param file_size: size of the whole file in bytes, also where `raw` came over a network
    :raises CheckpointError: as :func:`read_header`
    """
    length = json_length(raw, file_size, path)
    text = raw[8 : 8 + length]
    if len(text) < length:
        _refuse(path, f"{len(text)} bytes of header", f"{length} bytes")
    if not text.startswith(b"{"):
        _refuse(path, "a header that does not start with '{'", "a JSON object")
    entries = parse_object(text, path)
    metadata = _metadata(entries.pop(_METADATA, None), path)
    infos = sorted((_info(name, entry, path) for name, entry in entries.items()), key=_in_file)
    data_start = 8 + length
    _check_cover(infos, file_size - data_start, path)
    return Header(path, MappingProxyType({i.name: i for i in infos}), metadata, data_start, file_size)


def _metadata(entry: object, path: Path) -> Mapping[str, str]:
    if entry is None:
        return MappingProxyType({})
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        _refuse(path, f"{_METADATA} that is not a map of strings", "strings only")
    return MappingProxyType(entry)


def _info(name: str, entry: object, path: Path) -> TensorInfo:
    where = f"{path}: tensor {name[:200]!r}"
    if not name or "\0" in name:
        _refuse(where, "an empty name or a NUL in a name", "a tensor name")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(where, "an entry with other fields", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(where, f"dtype {str(dtype)[:40]!r}", f"one of {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > _MAX_RANK:
        _refuse(where, f"shape {str(shape)[:80]}", f"at most {_MAX_RANK} sizes of 0 or more")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(where, f"data_offsets {str(offsets)[:80]}", "two offsets in rising order")
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits % 8 or (dtype == "F4" and (not shape or shape[-1] % 2)):
        _refuse(where, f"{dtype} of shape {shape}", "whole bytes per row")
    if offsets[1] - offsets[0] != bits // 8:
        _refuse(where, f"{offsets[1] - offsets[0]} bytes", f"{bits // 8} bytes for {dtype} of shape {shape}")
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def _in_file(info: TensorInfo) -> tuple[int, int, str]:
    """The order of the bytes; empty tensors at one offset have none, and go by name whatever the JSON's order."""
    return info.begin, info.end, info.name


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_cover(infos: list[TensorInfo], data_size: int, path: Path) -> None:
    end = 0
    for info in infos:
        if info.begin != end:
            kind = "overlaps the tensor before it" if info.begin < end else f"leaves {info.begin - end} bytes unused"
            _refuse(f"{path}: tensor {info.name[:200]!r}", f"data at {info.begin}, which {kind}", f"data at {end}")
        end = info.end
    if end > data_size:
        _refuse(path, f"{data_size} bytes of data", f"{end} bytes: the file is truncated")
    if end < data_size:
        _refuse(path, f"{data_size} bytes of data", f"{end} bytes: something follows the last tensor")


def _refuse(subject: object, found: str, wanted: str) -> NoReturn:
    raise CheckpointError(
        subject,
        found=found,
        wanted=wanted,
        remedy="the file is damaged, incomplete or not safetensors: download it again and compare its hash",
    )


def place(infos: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Give tensors consecutive offsets from 0, for a file that is about to be written.

    The order is kept wherever each tensor then starts on a multiple of its element size. Where it would not (an fp8
    tensor of odd length took the place of a bf16 one), tensors of larger elements go first, otherwise in the given
    order: loaders view the data in place, and torch refuses a misaligned view.

    :param infos: name, dtype, shape and length count; the offsets only as a difference
    """
    order = list(infos)
    placed = _consecutive(order)
    if any(info.begin % DTYPES[info.dtype].alignment for info in placed):
        placed = _consecutive(sorted(order, key=lambda info: -DTYPES[info.dtype].alignment))
    return placed


def _consecutive(infos: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    end = 0
    placed = []
    for info in infos:
        placed.append(replace(info, begin=end, end=end + info.nbytes))
        end += info.nbytes
    return tuple(placed)


def encode_header(infos: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The length and JSON bytes of a file with these tensors; the same bytes for the same tensors in any mapping order.

    The JSON is padded with spaces to a multiple of 8 bytes, as the format asks, so that the data section is aligned.

    :raises CheckpointError: more than :data:`MAX_HEADER_BYTES`, which no loader would read
    """
    entries: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for info in sorted(infos, key=_in_file):
        entries[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": (info.begin, info.end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            "the header of a shard to write",
            found=f"{len(text)} bytes",
            wanted=f"at most {MAX_HEADER_BYTES}",
            remedy="spread the tensors over more shards",
        )
    return struct.pack("<Q", len(text)) + text
