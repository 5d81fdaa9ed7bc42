"""What a conversion has already done, on disk, so that a killed run goes on and a foreign one is refused.

The partial destination holds `plan.json`, which says which conversion this is; one journal per part; and `files/`,
which becomes the destination in one rename. A journal has a line of JSON for every finished file, to be read by
people as well; it is written, and synced, only after the file that it speaks of has been synced under its final name.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weightprep.checkpoint.json_file import read_object
from weightprep.checkpoint.manifest import ModuleRecord
from weightprep.checkpoint.writer import fsync_directory
from weightprep.convert.options import ConvertOptions, Part
from weightprep.convert.partial import NAMES, check_partial, make_directories, put_back, tree_of
from weightprep.errors import CheckpointError

__all__ = ["Entry", "Journal", "claim", "identity_of", "journaled_files", "parts_of"]

_PLAN = "plan.json"
_MAX_PLAN_BYTES = 2**16
# With what NFS leaves of a file that was removed while it was open.
_OUR_FILES = re.compile(r"plan\.json|journal-\d+-of-\d+\.jsonl$|\.nfs")


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished file: its size, and the records of the modules that were converted into it."""

    file: str
    nbytes: int
    modules: tuple[ModuleRecord, ...]


def claim(options: ConvertOptions, identity: str, parts: int, summary: Mapping[str, Any]) -> None:
    """Make the working directory that of the conversion `identity`, or find that it already is.

    With --overwrite another conversion's partial result is removed, if nobody is working on it.

    :param parts: how many journals the work is spread over
    :param summary: further fields for a person who finds the directory
    :raises CheckpointError: another conversion's partial result is there, or something else
    """
    partial = options.partial
    check_partial(partial)
    if partial.exists() and not _ours(partial):
        raise _foreign(partial, "files that no conversion of weightprep left there", "remove or rename the directory")
    if (partial / _PLAN).exists() and not tree_of(partial).exists():
        # Left by a run that was killed between its last rename and the clearing up.
        _discard(options)
    make_directories(partial)
    if _claimed(partial, identity, parts, summary):
        return
    another = _foreign(partial, "the partial result of another conversion, or of this one before its source changed")
    if not options.overwrite:
        raise another
    _discard(options)
    make_directories(partial)
    if not _claimed(partial, identity, parts, summary):
        raise another


def _ours(partial: Path) -> bool:
    """Whether what is there can have been left by a run, and may be removed if its time is over."""
    if not all(entry.name in NAMES or _OUR_FILES.match(entry.name) for entry in partial.iterdir()):
        return False
    begun = any(path.exists() and any(path.iterdir()) for path in (partial / name for name in NAMES))
    # Looked at last: another part of the job array may have put its plan down and begun in the meantime.
    if not (partial / _PLAN).exists():
        return not begun
    return isinstance(read_object(partial / _PLAN, max_bytes=_MAX_PLAN_BYTES).get("identity"), str)


def parts_of(partial: Path) -> int:
    """Over how many journals the work in `partial` is spread.

    :raises CheckpointError: nothing was begun there
    """
    if not (partial / _PLAN).exists():
        raise CheckpointError(
            partial,
            found="nothing: no conversion in parts was started",
            wanted="the work of every part of a job array",
            remedy="run every part first (--part 1/n ... --part n/n), or convert without --part and --finish",
        )
    parts = read_object(partial / _PLAN, max_bytes=_MAX_PLAN_BYTES).get("parts")
    if type(parts) is not int or parts < 1:
        raise _foreign(partial, f"a plan of {parts!r} parts")
    return parts


def identity_of(partial: Path) -> object:
    """Which conversion the work in `partial` belongs to; None where nothing was begun."""
    if not (partial / _PLAN).exists():
        return None
    return read_object(partial / _PLAN, max_bytes=_MAX_PLAN_BYTES).get("identity")


def _claimed(partial: Path, identity: str, parts: int, summary: Mapping[str, Any]) -> bool:
    """Put the plan down, or compare with the one that is there."""
    # Written under a name of its own and linked: of two processes that start at once, one plan wins whole.
    wanted = {"identity": identity, "parts": parts}
    draft = partial / f"{_PLAN}.{os.uname().nodename}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    with draft.open("x") as file:
        json.dump({**wanted, **summary}, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, partial / _PLAN)
    except FileExistsError:
        found = read_object(partial / _PLAN, max_bytes=_MAX_PLAN_BYTES)
        return {key: found.get(key) for key in wanted} == wanted
    finally:
        draft.unlink()
    fsync_directory(partial)
    return True


def _discard(options: ConvertOptions) -> None:
    for path in options.partial.glob("journal-*.jsonl"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _busy(options.partial) from None
    put_back(options)
    shutil.rmtree(options.partial)


def _foreign(
    partial: Path,
    found: str,
    remedy: str = "repeat the command that began it, or remove the directory (--overwrite does)",
) -> CheckpointError:
    return CheckpointError(
        partial,
        found=found,
        wanted="the partial result of this very conversion, or nothing",
        remedy=remedy,
    )


def _busy(partial: Path) -> CheckpointError:
    return CheckpointError(
        partial,
        found="another process that is writing into it",
        wanted="one conversion at a time per destination",
        remedy="wait for it, or choose another destination",
    )


class Journal:
    """The journal of one part, locked for this process while it is open.

    :raises CheckpointError: another process holds it
    """

    def __init__(self, partial: Path, part: Part) -> None:
        self._path = partial / f"journal-{part.index}-of-{part.count}.jsonl"
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alive = self._path.stat().st_ino == os.fstat(self._fd).st_ino
        except (BlockingIOError, FileNotFoundError):
            alive = False
        if not alive:
            os.close(self._fd)
            raise _busy(partial)
        self._end_line()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def add(self, entry: Entry) -> None:
        """Record a finished file."""
        line = {
            "file": entry.file,
            "bytes": entry.nbytes,
            "modules": [record.model_dump(mode="json") for record in entry.modules],
        }
        # In ASCII, so that no character of a name ends the line for whoever reads it.
        os.write(self._fd, (json.dumps(line) + "\n").encode())
        os.fsync(self._fd)

    def _end_line(self) -> None:
        """End a line that a killed run left unfinished; it is not valid JSON and will be ignored."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")


def journaled_files(partial: Path) -> dict[str, Entry]:
    """Every file that a journal calls finished and that is there in the size that the journal tells."""
    entries: dict[str, Entry] = {}
    for path in sorted(partial.glob("journal-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            entry = _parse(line)
            if entry is not None and _size(tree_of(partial) / entry.file) == entry.nbytes:
                entries[entry.file] = entry
    return entries


def _parse(line: str) -> Entry | None:
    try:
        data = json.loads(line)
        modules = tuple(ModuleRecord.model_validate(m) for m in data["modules"])
        # A name that no file system takes is nobody's.
        return Entry(os.fsdecode(os.fsencode(data["file"])), data["bytes"], modules)
    except (ValueError, KeyError, TypeError, RecursionError):
        # The line of a run that was killed while it wrote it, or a stranger's: its file is done again.
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None
