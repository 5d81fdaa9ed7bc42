"""The directory beside the destination that a conversion works in, and the rename that turns its files into the result.

`files/` becomes the destination. What is being written lies in `unfinished/`, where no name of the checkpoint can
collide with it. `replaced` is the checkpoint that --overwrite replaces, for the moment between two renames.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from weightprep.checkpoint.writer import fsync_directory
from weightprep.convert.options import ConvertOptions
from weightprep.errors import CheckpointError

__all__ = [
    "NAMES",
    "check_partial",
    "clear_unfinished",
    "commit",
    "make_directories",
    "put_back",
    "stop_file_of",
    "temporary_of",
    "tree_of",
]

_FILES = "files"
_UNFINISHED = "unfinished"
_REPLACED = "replaced"
# The directories in it.
NAMES = frozenset({_FILES, _UNFINISHED, _REPLACED})


def tree_of(partial: Path) -> Path:
    """Where, in the working directory `partial`, the destination's files are."""
    return partial / _FILES


def temporary_of(partial: Path, name: str | Path, attempt: str = "") -> Path:
    """Where the file `name` of the destination is written until it is whole; as short for a long name as for any.

    :param attempt: tells apart processes that may write the same file at once
    """
    return partial / _UNFINISHED / (hashlib.sha256(os.fsencode(name)).hexdigest() + attempt)


def stop_file_of(partial: Path, run: str) -> Path:
    """The file whose presence stops the run of this name on every machine that sees it."""
    return partial / _UNFINISHED / f"stop-{run}"


def clear_unfinished(partial: Path) -> None:
    """Remove what killed processes left half written; nobody else may be at work in `partial`."""
    for path in (partial / _UNFINISHED).iterdir():
        path.unlink(missing_ok=True)


def check_partial(partial: Path) -> None:
    """Refuse a working directory through which a write would land somewhere else.

    :raises CheckpointError: it, or anything in its files, is a symbolic link; or it is no directory
    """
    for path in (partial, *(partial / name for name in sorted(NAMES))):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(mode):
            raise _not_ours(path, "a symbolic link" if stat.S_ISLNK(mode) else "something that is not a directory")
    for directory, subdirectories, names in os.walk(tree_of(partial)):
        for name in (*subdirectories, *names):
            if (path := Path(directory) / name).is_symlink():
                raise _not_ours(path, "a symbolic link")


def _not_ours(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        found=found,
        wanted="a directory that weightprep made, or nothing",
        remedy="weightprep makes no links and no such file there: find out who did, and remove it",
    )


def make_directories(partial: Path) -> None:
    """Make the working directory, unless it is there."""
    for name in (_FILES, _UNFINISHED):
        (partial / name).mkdir(parents=True, exist_ok=True)


def put_back(options: ConvertOptions) -> None:
    """Undo the first rename of a :func:`commit` that did not come to its second one."""
    replaced = options.partial / _REPLACED
    if replaced.is_dir() and tree_of(options.partial).is_dir() and not os.path.lexists(options.output):
        replaced.rename(options.output)


def commit(options: ConvertOptions) -> None:
    """Give the finished files the destination's name.

    :raises CheckpointError: something came to the destination during the run that may not be replaced
    """
    partial, output = options.partial, options.output
    options.check_destination()
    replaced = partial / _REPLACED
    if options.overwrite and output.exists() and any(output.iterdir()):
        if replaced.exists():
            shutil.rmtree(replaced)
        output.rename(replaced)
    try:
        # Takes the place of an empty directory; the kernel refuses any other that appears only now.
        tree_of(partial).rename(output)
    except BaseException:
        put_back(options)
        raise
    try:
        fsync_directory(output.parent)
    finally:
        # Whatever the disk says now, the destination is there and whole.
        shutil.rmtree(partial, ignore_errors=True)
