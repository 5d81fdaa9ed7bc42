"""Which files of a directory belong to the checkpoint: names come from an index that anyone may have written.

A name is a plain file name, and what it leads to lies inside the checkpoint directory. The one exception is a
snapshot of the Hugging Face cache, whose entries are links from snapshots/<revision>/ into the blobs/ beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from weightprep.checkpoint.json_file import unreadable
from weightprep.errors import CheckpointError

__all__ = ["check_name", "walk_files"]

_MAX_NAME_BYTES = 255
# Bookkeeping of git and of `hf download --local-dir`; no part of the repository's content.
_BOOKKEEPING = frozenset({".git", ".cache"})


def check_name(name: str, *, named_by: object) -> None:
    """Refuse `name` unless it is a plain file name, which cannot lead out of a directory.

    :param named_by: the file in which the name stands
    :raises CheckpointError: it is anything else
    """
    if (
        not name
        or name in (".", "..")
        or any(character in name for character in "/\\\0")
        or not _is_utf8(name)
        or len(name.encode()) > _MAX_NAME_BYTES
    ):
        raise CheckpointError(
            named_by,
            found=f"the file name {name[:200]!r}",
            wanted="a plain file name inside the checkpoint directory",
            remedy="do not use this checkpoint unless you know who wrote it; its index points elsewhere",
        )


def _is_utf8(name: str) -> bool:
    # as no index, manifest or journal could name it
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _resolve(root: Path, path: Path) -> Path:
    real_root = Path(os.path.realpath(root))
    real = Path(os.path.realpath(path))
    allowed = [real_root]
    if real_root.parent.name == "snapshots":
        allowed.append(real_root.parent.parent / "blobs")
    if not any(real.is_relative_to(directory) for directory in allowed):
        raise CheckpointError(
            path,
            found=f"a symbolic link to {real}",
            wanted="a file inside the checkpoint directory",
            remedy="replace the link by the file, or pass the directory that holds the files",
        )
    return real


def walk_files(root: Path) -> dict[Path, Path]:
    """All files of the repository at `root`: relative path -> real path, in sorted order.

    :raises CheckpointError: a link leads out of the checkpoint, a directory is a link, something is no regular file,
        or a directory cannot be read
    """
    try:
        return _walk(root)
    except OSError as error:
        raise unreadable(Path(error.filename or root), error) from None


def _walk(root: Path) -> dict[Path, Path]:
    def fail(error: OSError) -> NoReturn:
        raise error

    found: dict[Path, Path] = {}
    for directory, subdirectories, names in os.walk(root, onerror=fail):
        here = Path(directory)
        if here == root:
            subdirectories[:] = [name for name in subdirectories if name not in _BOOKKEEPING]
        subdirectories.sort()
        for name in subdirectories:
            if (here / name).is_symlink():
                raise _not_a_file(here / name, "a link to a directory")
        for name in sorted(names):
            real = _resolve(root, here / name)
            if not real.is_file():
                raise _not_a_file(here / name, "a broken link or something that is not a regular file")
            found[(here / name).relative_to(root)] = real
    return found


def _not_a_file(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        found=found,
        wanted="regular files and directories",
        remedy="remove it, or replace it by what it should lead to",
    )
