"""Brings a whole file to the destination: linked where that is asked for and possible, else copied inside the kernel.

Nothing here ever opens an existing file for writing. A hard link shares its inode with the source, so a write through
it would change the source; every file is made under a temporary name and renamed over whatever is there.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from weightprep.checkpoint.copying import copy_range
from weightprep.checkpoint.json_file import open_regular
from weightprep.convert.options import LinkMode
from weightprep.errors import CheckpointError

__all__ = ["can_link", "place_file", "replace_file", "sync_file", "write_bytes"]

_FICLONE = 0x40049409
# A file system without reflinks or hard links, one that differs, or a kernel that protects foreign files from being
# linked.
_CANNOT = frozenset(
    {
        errno.EXDEV,
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
        errno.EINVAL,
        errno.ENOTTY,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.ENOSYS,
    }
)


def can_link(source: Path, directory: Path, mode: LinkMode) -> bool:
    """Whether `place_file` can be expected to bring `source` into `directory` without taking space."""
    return mode is not LinkMode.COPY and source.stat().st_dev == directory.stat().st_dev


def place_file(source: Path, temporary: Path, mode: LinkMode, on_bytes: Callable[[int], None]) -> str:
    """Make `temporary` a link to, a clone or a copy of `source` (a real path), and return which; not synced.

    :raises CheckpointError: the mode was asked for by name and does not work here
    :raises OSError: reading or writing failed
    """
    attempts = {
        LinkMode.AUTO: (LinkMode.REFLINK, LinkMode.HARD, LinkMode.COPY),
        LinkMode.HARD: (LinkMode.HARD,),
        LinkMode.REFLINK: (LinkMode.REFLINK,),
        LinkMode.COPY: (LinkMode.COPY,),
    }[mode]
    for attempt in attempts:
        try:
            _ATTEMPTS[attempt](source, temporary, on_bytes)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in _CANNOT or attempt is LinkMode.COPY:
                raise
        else:
            return attempt.value
    raise CheckpointError(
        source,
        found=f"no way to make a {mode.value} link from {temporary.parent}",
        wanted="source and destination on one file system that supports it",
        remedy="use --link auto, which copies where it cannot link",
    )


def _hard(source: Path, temporary: Path, on_bytes: Callable[[int], None]) -> None:
    os.link(source, temporary)
    on_bytes(source.stat().st_size)


def _reflink(source: Path, temporary: Path, on_bytes: Callable[[int], None]) -> None:
    _into(source, temporary, lambda read, write: fcntl.ioctl(write, _FICLONE, read))
    on_bytes(source.stat().st_size)


def _copy(source: Path, temporary: Path, on_bytes: Callable[[int], None]) -> None:
    def move(read: int, write: int) -> None:
        size = os.fstat(read).st_size
        copy_range(read, write, source_offset=0, target_offset=0, nbytes=size, on_bytes=on_bytes)

    _into(source, temporary, move)


def _into(source: Path, temporary: Path, move: Callable[[int, int], object]) -> None:
    read = open_regular(source)
    try:
        write = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            move(read, write)
        finally:
            os.close(write)
    finally:
        os.close(read)


_ATTEMPTS: dict[LinkMode, Callable[[Path, Path, Callable[[int], None]], None]] = {
    LinkMode.HARD: _hard,
    LinkMode.REFLINK: _reflink,
    LinkMode.COPY: _copy,
}


def sync_file(path: Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    fd = open_regular(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(temporary: Path, final: Path) -> None:
    """Give a synced file its final name."""
    temporary.replace(final)
    # rename() does nothing where both names are links to one inode.
    temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes, temporary: Path) -> None:
    """Write a small file whole: as `temporary` on the same file system, synced, renamed."""
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        os.fsync(fd)
    finally:
        os.close(fd)
    replace_file(temporary, path)
