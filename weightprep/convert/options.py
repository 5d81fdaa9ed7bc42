"""What the user asked `convert` for, checked once: everything below works on these values and asks nobody again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from weightprep.errors import CheckpointError

__all__ = [
    "PARTIAL_SUFFIX",
    "SIDECAR_DIR",
    "ConvertOptions",
    "Executor",
    "Layout",
    "LinkMode",
    "Part",
    "nearest_existing",
]

# A sibling of the destination, so that the final rename stays on one file system.
PARTIAL_SUFFIX = ".partial"
# NAME_MAX and, less what may come below the destination, PATH_MAX of Linux.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4096 - 512
SIDECAR_DIR = "weightprep"


class Layout(str, Enum):
    """Where converted tensors go: into the shards themselves, or into a subfolder beside them."""

    INLINE = "inline"
    SIDECAR = "sidecar"


class LinkMode(str, Enum):
    """How a shard that no conversion touches reaches the destination."""

    AUTO = "auto"
    HARD = "hard"
    REFLINK = "reflink"
    COPY = "copy"


class Executor(str, Enum):
    """Who writes the files: threads of this process, or the workers of a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class Part:
    """This process does part `index` (from 1) of `count`."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """One conversion.

    :param precision: of all modules, or by layer group; None takes the recipe's default
    :param requantize: store fp8 sources again under one scale per tensor instead of passing them
    :param workers: shards in flight at once; with Ray, for each node
    :param part: of a job array; None does everything and commits
    :param finish: only commit what the parts of a job array have written
    """

    source: Path
    destination: Path
    recipe: str | None = None
    layout: Layout = Layout.INLINE
    link: LinkMode = LinkMode.AUTO
    precision: str | Mapping[str, str] | None = None
    nextn: Literal["convert", "keep"] = "convert"
    requantize: bool = False
    allow_quality_loss: bool = False
    workers: int = 2
    executor: Executor = Executor.LOCAL
    part: Part | None = None
    finish: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        """`.` and `..` have no siblings, and the current directory itself may be replaced."""
        if self.destination.name in ("", ".."):
            object.__setattr__(self, "destination", _real(self.destination))

    @property
    def in_place(self) -> bool:
        """Whether a sidecar is added to the source directory itself."""
        return self.layout is Layout.SIDECAR and _real(self.source) == _real(self.destination)

    @property
    def output(self) -> Path:
        """The directory that appears when the conversion is complete."""
        return self.destination / SIDECAR_DIR if self.in_place else self.destination

    def listed(self, file: str) -> str:
        """How a manifest names `file` of the output: from the checkpoint directory, also for a sidecar in place."""
        return f"{SIDECAR_DIR}/{file}" if self.in_place else file

    @property
    def partial(self) -> Path:
        """The directory that is worked in until then."""
        return self.output.with_name(self.output.name + PARTIAL_SUFFIX)

    def check_destination(self) -> None:
        """Refuse a destination that would harm the source or something that is already there.

        :raises CheckpointError: destination = source, inside it or around it; not empty; not writable
        """
        source, destination = _real(self.source), _real(self.destination)
        if not self.in_place:
            if source == destination:
                raise _refuse(destination, "the source itself", "another directory", "or add --layout sidecar")
            if destination.is_relative_to(source):
                raise _refuse(destination, "a directory inside the source", "a directory outside it")
            if source.is_relative_to(destination):
                raise _refuse(destination, "a directory that contains the source", "a directory outside it")
        output = self.output
        _check_length(self.partial)
        if output.is_symlink() or (output.exists() and not output.is_dir()):
            raise _refuse(output, "something that is not a directory", "a new or empty directory")
        if output.is_mount():
            # It cannot be renamed over, and its sibling is on another disk.
            raise _refuse(output, "a mount point", "a directory below it")
        if output.exists() and any(output.iterdir()):
            if not self.overwrite:
                raise _refuse(output, "files in it", "a new or empty directory", "or add --overwrite to replace it")
            if not self.in_place and not (output / "config.json").exists():
                raise _refuse(output, "a directory that is no checkpoint", "a checkpoint that --overwrite may replace")
        parent = nearest_existing(output.parent)
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise _refuse(output, f"no right to write in {parent}", "a writable place")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _check_length(partial: Path) -> None:
    name = max(map(len, map(os.fsencode, partial.parts)))
    whole = len(os.fsencode(partial.absolute()))
    if name > _MAX_NAME_BYTES or whole > _MAX_PATH_BYTES:
        raise CheckpointError(
            str(partial)[:200],
            found=f"a path of {whole} bytes with a part of {name}",
            wanted=f"at most {_MAX_PATH_BYTES} bytes, and {_MAX_NAME_BYTES} in each part",
            remedy="choose a shorter name for the destination",
        )


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _refuse(path: Path, found: str, wanted: str, alternative: str = "") -> CheckpointError:
    remedy = "choose another destination" + (f", {alternative}" if alternative else "")
    return CheckpointError(path, found=found, wanted=wanted, remedy=remedy)
