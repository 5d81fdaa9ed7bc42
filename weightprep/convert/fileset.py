"""Which files a result has, and whether index and copies are what they must be: the part of `verify` above tensors.

A file too many can change what a loader does (a pickle, a second config, code of the repository), so every file of
the result is accounted for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from weightprep.checkpoint.json_file import open_regular
from weightprep.checkpoint.repository import INDEX_NAME
from weightprep.convert.reread import Finding, Stored, read_json
from weightprep.errors import CheckpointError

__all__ = ["check_file_set", "check_index", "check_repository"]

_PIECE_BYTES = 2**20
_SHOWN = 200
_ABSENT = object()
# What git and `hf download` put beside a repository's content; convert does not carry them over either.
_BOOKKEEPING = (".git", ".cache")


def check_file_set(root: Path, wanted: Collection[Path]) -> Iterator[Finding]:
    """Compare the files below `root` with `wanted`, paths relative to it: first what is missing, then what is extra."""
    present: set[Path] = set()
    odd: list[Finding] = []

    def fail(error: OSError) -> None:
        odd.append(Finding(str(error.filename), error.strerror or "no access", "a directory that can be read"))

    for directory, folders, names in os.walk(root, onerror=fail):
        here = Path(directory)
        if here == root:
            folders[:] = [name for name in folders if name not in _BOOKKEEPING]
        for name in names + [name for name in folders if (here / name).is_symlink()]:
            path = here / name
            present.add(path.relative_to(root))
            if path.is_symlink() or not path.is_file():
                odd.append(Finding(str(path), "a link or a special file", "a regular file"))
    for relative in sorted(set(wanted) - present):
        yield Finding(str(root / relative), "no such file", "a file of the conversion")
    yield from odd
    for relative in sorted(present - set(wanted)):
        yield Finding(str(root / relative), "a file that nothing accounts for", "no such file")


def check_repository(root: Path, copies: Mapping[Path, Path], texts: Mapping[Path, bytes]) -> Iterator[Finding]:
    """Compare the files below `root` that hold no tensors; one that is not there is the file set's finding.

    :param copies: path -> the file of the source that it must equal byte for byte
    :param texts: path -> what it must hold; what the index must say is :func:`check_index`'s
    """
    for relative, original in copies.items():
        copy = root / relative
        if copy.is_file() and _sha256(copy) != _sha256(original):
            yield Finding(str(copy), "other bytes", f"the bytes of {original}")
    for relative, text in texts.items():
        path = root / relative
        if relative.name != INDEX_NAME and path.is_file() and path.read_bytes() != text:
            yield _other_text(path, text)


def _other_text(path: Path, wanted: bytes) -> Finding:
    """What differs between the JSON file `path` and `wanted`, the bytes that it must have."""
    try:
        found = read_json(path)
    except (CheckpointError, ValueError) as error:
        reason = error.found if isinstance(error, CheckpointError) else str(error)
        return Finding(str(path), reason, "the source's, edited by convert")
    differing = _difference(found, json.loads(wanted))
    if differing is None:
        return Finding(str(path), "same content, other bytes", "the bytes that convert writes")
    place, value, right = differing
    return Finding(f"{path}: {place}", _shown(value), _shown(right))


def _difference(found: object, wanted: object, place: str = "") -> tuple[str, object, object] | None:
    """The first key path at which two JSON values differ, with both values, :data:`_ABSENT` for none."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        # repr tells 5 from "5" and True from 1
        return None if repr(found) == repr(wanted) else (place, found, wanted)
    for key in (*wanted, *(key for key in found if key not in wanted)):
        inner = f"{place}.{key}" if place else key
        differing = _difference(found.get(key, _ABSENT), wanted.get(key, _ABSENT), inner)
        if differing is not None:
            return differing
    return None


def _shown(value: object) -> str:
    return "no such key" if value is _ABSENT else repr(value)[:_SHOWN]


def check_index(root: Path, source: Path, tensors: Mapping[str, Stored], absent: Collection[str]) -> Iterator[Finding]:
    """Compare the index of `root` with its `tensors`, and what else it says with the index of the directory `source`.

    :param absent: shards that are missing or unreadable, whose tensors are therefore unknown
    """
    path = root / INDEX_NAME
    if not path.is_file():
        return
    try:
        index, original = read_json(path), read_json(source / INDEX_NAME)
    except (CheckpointError, ValueError) as error:
        yield Finding(str(path), error.found if isinstance(error, CheckpointError) else str(error), "an index")
        return
    weight_map = index.pop("weight_map", None)
    original.pop("weight_map", None)
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        yield Finding(str(path), "no weight_map of strings", "a weight_map")
        return
    known = {name for name, shard in weight_map.items() if shard not in absent}
    for name in sorted(known ^ tensors.keys()):
        where = "in the index only" if name in known else "in a shard only"
        yield Finding(f"{path}: {name}", where, "in both")
    for name in sorted(known & tensors.keys()):
        if weight_map[name] != tensors[name].path.name:
            yield Finding(f"{path}: {name}", f"the index says {weight_map[name]}", tensors[name].path.name)
    metadata = original.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata and not absent:
        metadata["total_size"] = sum(tensor.end - tensor.begin for tensor in tensors.values())
    # repr tells 5 from "5" and True from 1
    if not absent and repr(index) != repr(original):
        yield Finding(f"{path}: metadata", repr(index)[:_SHOWN], repr(original)[:_SHOWN])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
