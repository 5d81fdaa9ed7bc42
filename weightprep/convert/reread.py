"""What `verify` reads with: a parser and a comparison of its own, so that one fault cannot hide in two places.

Nothing here raises for what a file says; what does not fit becomes a finding.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightprep.checkpoint.json_file import open_regular
from weightprep.errors import CheckpointError

__all__ = [
    "Finding",
    "Stored",
    "check_metadata",
    "linked_files",
    "read_all",
    "read_json",
    "read_stored",
    "same_bytes",
    "sha256_of",
    "stored_bytes",
]

_CHUNK_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 100_000_000
_MAX_JSON_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which a result is not what it should be."""

    subject: str
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.subject}: found {self.found}; wanted {self.wanted}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file holds it: `begin` and `end` are offsets in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_stored(path: Path) -> tuple[dict[str, Stored], dict[str, str] | None, list[Finding]]:
    """The tensors and the metadata of a safetensors file, and what is wrong with it; no metadata if unreadable."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, size - 8):
                return {}, None, [Finding(str(path), f"a header length of {length}", f"a header inside {size} bytes")]
            header = _parse(file.read(length))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ that is not a mapping of strings")
        stored = {name: _stored(name, path, entry, 8 + length) for name, entry in header.items()}
    except CheckpointError as error:
        return {}, None, [Finding(str(path), error.found, "a safetensors file")]
    except (OSError, ValueError) as error:
        return {}, None, [Finding(str(path), f"no readable header: {error}", "a safetensors file")]
    findings = []
    end = 8 + length
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end or tensor.end < tensor.begin:
            findings.append(Finding(f"{path}: {tensor.name}", f"data at {tensor.begin}", f"data at {end}"))
        end = tensor.end
    if end != size:
        findings.append(Finding(str(path), f"{size} bytes", f"{end} bytes"))
    return stored, metadata, findings


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    :raises CheckpointError: the file cannot be opened, or is no regular file
    :raises ValueError: it holds anything but one object, each key once
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return _parse(file.read(_MAX_JSON_BYTES))


def _parse(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key that is given twice")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("JSON that is no object")
    return value


def _stored(name: str, path: Path, entry: object, start: int) -> Stored:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"an entry of {name[:200]!r} that is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    # bool is an int, and 2.0 equals 2: neither is what the format has
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or len(offsets) != 2:
        raise ValueError(f"an entry of {name[:200]!r} with values of other types")
    return Stored(name, path, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def stored_bytes(tensor: Stored) -> Iterator[bytes]:
    """The tensor's bytes in pieces; fewer than `end - begin` where the file is too short."""
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left > 0 and (piece := file.read(min(left, _CHUNK_BYTES))):
            left -= len(piece)
            yield piece


def same_bytes(a: Stored, b: Stored) -> bool:
    """Whether two tensors have the same bytes; files that are one inode need no reading."""
    if a.end - a.begin != b.end - b.begin:
        return False
    if a.begin == b.begin and a.path.samefile(b.path):
        return True
    return all(piece == other for piece, other in zip(_exact(a), _exact(b), strict=True))


def linked_files(tensors: Iterable[Stored], copies: Mapping[str, Stored]) -> frozenset[Path]:
    """Those files of `tensors` that are one inode with the file of their copies: whoever writes into one changes both.

    :param copies: by the tensors' names
    """
    pairs = {(tensor.path, copies[tensor.name].path) for tensor in tensors if tensor.name in copies}
    return frozenset(path for path, copy in pairs if path.samefile(copy))


def _exact(tensor: Stored) -> Iterator[bytes]:
    """Pieces of one size, whatever the reads return, so that two files can be compared piece by piece."""
    held = b""
    for piece in stored_bytes(tensor):
        held += piece
        if len(held) >= _CHUNK_BYTES:
            yield held[:_CHUNK_BYTES]
            held = held[_CHUNK_BYTES:]
    yield held


def sha256_of(tensor: Stored) -> str:
    """SHA-256 of the tensor's bytes."""
    digest = hashlib.sha256()
    for piece in stored_bytes(tensor):
        digest.update(piece)
    return digest.hexdigest()


def read_all(paths: Iterable[Path]) -> tuple[dict[str, Stored], dict[Path, dict[str, str]], list[Finding]]:
    """The tensors of several files, the metadata of those that can be read, and what is wrong."""
    tensors: dict[str, Stored] = {}
    metadata: dict[Path, dict[str, str]] = {}
    findings: list[Finding] = []
    for path in sorted(paths):
        stored, described, faults = read_stored(path)
        findings += faults
        if described is not None:
            metadata[path] = described
        for name in sorted(tensors.keys() & stored.keys()):
            findings.append(Finding(name, f"in {tensors[name].path.name} and in {path.name}", "in one shard"))
        tensors |= stored
    return tensors, metadata, findings


def check_metadata(
    wanted: Mapping[Path, Mapping[str, str] | None], found: Mapping[Path, Mapping[str, str]]
) -> Iterator[Finding]:
    """Compare the string maps of the headers of those files that could be read."""
    for path in sorted(wanted.keys() & found.keys()):
        if found[path] != wanted[path]:
            yield Finding(f"{path}: __metadata__", str(found[path])[:200], str(wanted[path])[:200])
