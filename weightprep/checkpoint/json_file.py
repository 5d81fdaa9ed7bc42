"""Reads JSON that somebody else wrote: a size limit first, then a parse whose result has exactly one meaning.

Python's parser keeps the last of two equal keys and accepts lone surrogates; both would let two readers of one
checkpoint see two different checkpoints, so both are refused here, for headers, indices and configs alike.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import NoReturn

from weightprep.errors import CheckpointError

__all__ = ["open_regular", "parse_object", "read_object", "unreadable"]


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The CheckpointError for a file that the system could not give us."""
    return CheckpointError(
        path,
        found=error.strerror or type(error).__name__,
        wanted="a readable file",
        remedy="check the path, its permissions and the disk, then run the command again",
    )


def open_regular(path: Path) -> int:
    """Open `path` for reading and return the descriptor.

    :raises CheckpointError: it cannot be opened or is not a regular file (a FIFO would block for ever)
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise unreadable(path, error if isinstance(error, OSError) else OSError(0, str(error))) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(
            path,
            found="something that is not a regular file",
            wanted="a regular file",
            remedy="replace it by the file itself",
        )
    return fd


def read_object(path: Path, *, max_bytes: int) -> dict[str, object]:
    """Parse the JSON object in the file at `path`, of at most `max_bytes` bytes.

    :raises CheckpointError: the file is missing, too large, not UTF-8, not JSON, ambiguous, or not an object
    """
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise CheckpointError(
                path,
                found=f"a JSON file of {size} bytes",
                wanted=f"at most {max_bytes} bytes",
                remedy="download the file again; no published checkpoint comes near this size",
            )
        try:
            raw = file.read(size)
        except OSError as error:
            raise unreadable(path, error) from None
    return parse_object(raw, path)


def parse_object(raw: bytes, subject: object) -> dict[str, object]:
    """Parse `raw` as one JSON object in which no key is given twice and every string is valid Unicode.

    :param subject: the file that errors name
    :raises CheckpointError: anything else
    """

    def refuse(found: str) -> NoReturn:
        raise CheckpointError(
            subject,
            found=found,
            wanted="one JSON object in UTF-8, each key once",
            remedy="download the file again, or repair it by hand",
        )

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            refuse(f"the key {twice[:200]!r} twice")
        return made

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if b"\\ud" in raw.lower():
            # Only an escape can bring in half of a surrogate pair; encoding finds it.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        refuse(f"text that is not UTF-8 ({error.reason if isinstance(error, UnicodeDecodeError) else 'surrogate'})")
    except RecursionError:
        refuse("JSON nested too deeply")
    except ValueError as error:
        refuse(f"text that is not JSON ({error})")
    if not isinstance(value, dict):
        refuse(f"a JSON {type(value).__name__}")
    return value
