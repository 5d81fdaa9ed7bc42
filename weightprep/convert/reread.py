"""What `verify` reads with: a parser and a comparison of its own, so that one fault cannot hide in two places.

Nothing here raises for what a file says; what does not fit becomes a finding.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Finding", "Stored", "read_stored", "same_bytes", "sha256_of", "stored_bytes"]

_CHUNK_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 100_000_000


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


def read_stored(path: Path) -> tuple[dict[str, Stored], dict[str, str], list[Finding]]:
    """The tensors and the metadata of a safetensors file, and what is wrong with it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                return {}, {}, [Finding(str(path), f"a header length of {length}", f"a header inside {size} bytes")]
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        stored = {name: _stored(name, path, entry, 8 + length) for name, entry in header.items()}
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, {}, [Finding(str(path), f"no readable header ({type(error).__name__})", "a safetensors file")]
    findings = []
    end = 8 + length
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end or tensor.end < tensor.begin:
            findings.append(Finding(f"{path}: {tensor.name}", f"data at {tensor.begin}", f"data at {end}"))
        end = tensor.end
    if end != size:
        findings.append(Finding(str(path), f"{size} bytes", f"{end} bytes"))
    return stored, metadata, findings


def _stored(name: str, path: Path, entry: dict[str, Any], start: int) -> Stored:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    return Stored(name, path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), start + begin, start + end)


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
