"""Moves byte ranges between files inside the kernel where the platform can, through one small buffer where it cannot.

copy_file_range shares extents on file systems with reflinks and never brings the bytes into this process; sendfile
works across file systems; the buffered copy works everywhere. Each is tried in turn: which one a pair of files
supports shows on use only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from enum import Enum

__all__ = ["CopyMethod", "copy_range"]

# Between two chunks progress is reported and an interrupt is taken.
_CHUNK_BYTES = 64 * 2**20
_BUFFER_BYTES = 2**20
# How kernels and file systems say "not between these two files": everything else is a real failure.
_UNSUPPORTED = frozenset(
    {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.ETXTBSY}
)


class CopyMethod(str, Enum):
    """One way to copy a byte range."""

    COPY_FILE_RANGE = "copy_file_range"
    SENDFILE = "sendfile"
    BUFFERED = "buffered"


def copy_range(
    source: int,
    target: int,
    *,
    source_offset: int,
    target_offset: int,
    nbytes: int,
    methods: Sequence[CopyMethod] = tuple(CopyMethod),
    on_bytes: Callable[[int], None] | None = None,
) -> CopyMethod:
    """Copy `nbytes` from descriptor `source` to descriptor `target` and return the method that did it.

    :param methods: tried in this order, each falling back to the next where the files do not support it
    :param on_bytes: called with the size of every chunk that was copied
    :raises OSError: reading or writing failed, or no method of `methods` is supported
    :raises EOFError: the source ends inside the range
    """
    done = 0
    for position, method in enumerate(methods):
        step = _STEPS[method]
        try:
            while done < nbytes:
                count = step(source, target, source_offset + done, target_offset + done, nbytes - done)
                if count == 0:
                    # Some file systems answer copy_file_range with 0 instead of an error; the last method knows better.
                    break
                _begin_writeback(target, target_offset + done, count)
                done += count
                if on_bytes is not None:
                    on_bytes(count)
        except OSError as error:
            if error.errno not in _UNSUPPORTED or position + 1 == len(methods):
                raise
        if done == nbytes:
            return method
    raise EOFError(f"the source ends {nbytes - done} bytes before the end of the range")


def _begin_writeback(target: int, offset: int, nbytes: int) -> None:
    """Let the disk write while more is read: left alone the kernel begins only when a tenth of the memory is unwritten.

    The advice is to forget the pages; those that have to be written first are written, and stay.
    """
    if nbytes >= _CHUNK_BYTES and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(target, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _copy_file_range(source: int, target: int, source_offset: int, target_offset: int, nbytes: int) -> int:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, "no copy_file_range on this platform")
    return os.copy_file_range(source, target, min(nbytes, _CHUNK_BYTES), source_offset, target_offset)


def _sendfile(source: int, target: int, source_offset: int, target_offset: int, nbytes: int) -> int:
    os.lseek(target, target_offset, os.SEEK_SET)
    return os.sendfile(target, source, source_offset, min(nbytes, _CHUNK_BYTES))


def _buffered(source: int, target: int, source_offset: int, target_offset: int, nbytes: int) -> int:
    chunk = memoryview(os.pread(source, min(nbytes, _BUFFER_BYTES), source_offset))
    written = 0
    while written < len(chunk):
        written += os.pwrite(target, chunk[written:], target_offset + written)
    return len(chunk)


_STEPS: dict[CopyMethod, Callable[[int, int, int, int, int], int]] = {
    CopyMethod.COPY_FILE_RANGE: _copy_file_range,
    CopyMethod.SENDFILE: _sendfile,
    CopyMethod.BUFFERED: _buffered,
}
