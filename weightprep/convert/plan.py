"""What a conversion is going to do, worked out from headers and config: a value that can be shown, checked and resumed.

Everything that can be refused is refused here, before the first byte is written. Every tensor of the source gets
exactly one fate.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from weightprep import __version__
from weightprep.checkpoint.header import TensorInfo
from weightprep.checkpoint.reader import SourceModule
from weightprep.checkpoint.repository import Checkpoint, TensorRef
from weightprep.convert.options import ConvertOptions
from weightprep.recipe import ModelPlan, ModulePlan
from weightprep.transforms.split_kv_b import split_kv_b

__all__ = [
    "ConversionPlan",
    "Fate",
    "ModuleJob",
    "OutputTensor",
    "PassedModule",
    "ShardJob",
    "SourceStamp",
    "TensorFate",
    "has_heads",
]


# Covers the header of nearly every shard; a change behind it that keeps size and time is out of reach without reading
# all.
_HEAD_BYTES = 2**20


class Fate(str, Enum):
    """What becomes of a source tensor."""

    TRANSFORMED = "transformed"
    PASSED = "passed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class TensorFate:
    """The fate of one source tensor, and the rule that decided it."""

    name: str
    fate: Fate
    rule: str


@dataclass(frozen=True, slots=True)
class ModuleJob:
    """One module that is converted.

    :param outputs: role in the stored bundle ("weight", "scale") -> the tensor that is written, offsets from 0
    :param overrides: the entry of the checkpoint's own exclude list that this conversion overrides
    """

    plan: ModulePlan
    source: SourceModule
    target_encoding: str
    outputs: Mapping[str, TensorInfo]
    overrides: str | None = None

    @property
    def source_refs(self) -> tuple[TensorRef, ...]:
        """The tensors that the module is read from."""
        return (self.source.weight, *((self.source.scale,) if self.source.scale else ()))

    def heads(self, dims: Mapping[str, int]) -> int | None:
        """How many attention heads the rows of the weight are, one after the other; None where they are none."""
        return dims["heads"] if has_heads(self.plan) else None


def has_heads(plan: ModulePlan) -> bool:
    """Whether rows of the module belong to heads: kv_b_proj alone is split by them, rows that only divide are not."""
    return any(step.transform is split_kv_b for step in plan.prepare)


@dataclass(frozen=True, slots=True)
class PassedModule:
    """One module that the recipe names and that stays as it is, and why."""

    plan: ModulePlan
    source: SourceModule
    reason: str


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of a shard that is written: copied from `copied`, or the output `role` of the module `module`."""

    info: TensorInfo
    copied: TensorRef | None = None
    module: str | None = None
    role: str | None = None


@dataclass(frozen=True, slots=True)
class ShardJob:
    """One file of the result, the unit of work and of resuming.

    :param name: path in the output directory
    :param source: the source file that it replaces, or is a link to or a copy of
    :param tensors: what to write, in order
    :param metadata: of the header to write; None: the file is linked or copied as it is
    :param modules: the modules that are converted into this file
    """

    name: str
    source: Path
    nbytes: int
    tensors: tuple[OutputTensor, ...] = ()
    metadata: Mapping[str, str] | None = None
    modules: tuple[ModuleJob, ...] = ()

    @property
    def rewritten(self) -> bool:
        """Whether the file is written anew, instead of linked or copied."""
        return self.metadata is not None


@dataclass(frozen=True, slots=True)
class SourceStamp:
    """What must not change in a source file between plan and copy."""

    path: Path
    size: int
    mtime_ns: int
    head_sha256: str

    @classmethod
    def of(cls, path: Path) -> SourceStamp:
        """The stamp of the file at `path` now; its first bytes are those of a safetensors header."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
        return cls(path, status.st_size, status.st_mtime_ns, hashlib.sha256(head).hexdigest())


@dataclass(frozen=True)
class ConversionPlan:
    """A whole conversion.

    :param jobs: shards, in the source's order
    :param copies: other files of the repository, relative path -> source file
    :param texts: files that are written last, relative path -> bytes (index, config.json)
    :param fates: one for every source tensor
    :param stamps: of every source file that is read; none where only the headers are here
    :param passed: modules that the recipe names and that stay as they are
    :param absent: modules of layers that this checkpoint does not have
    :param left_behind: files of the source that do not come along
    :param unmatched_excludes: entries of the checkpoint's own exclude lists that name nothing in it
    :param unclaimed: modules of a kind that the recipe names, in layers that it does not
    """

    options: ConvertOptions
    checkpoint: Checkpoint
    model: ModelPlan
    jobs: tuple[ShardJob, ...]
    copies: Mapping[Path, Path]
    texts: Mapping[Path, bytes]
    fates: tuple[TensorFate, ...]
    stamps: Mapping[Path, SourceStamp]
    passed: tuple[PassedModule, ...]
    absent: tuple[ModulePlan, ...]
    left_behind: tuple[Path, ...]
    unmatched_excludes: tuple[str, ...] = ()
    unclaimed: tuple[str, ...] = ()

    @cached_property
    def modules(self) -> tuple[ModuleJob, ...]:
        """Every converted module, in the recipe's order."""
        order = {plan.source: position for position, plan in enumerate(self.model.modules)}
        return tuple(sorted((m for job in self.jobs for m in job.modules), key=lambda m: order[m.plan.source]))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Source tensors without a counterpart in the result."""
        return tuple(fate.name for fate in self.fates if fate.fate is Fate.DROPPED)

    @cached_property
    def precision(self) -> str | dict[str, str] | None:
        """As a manifest records it, see ModelPlan.precision."""
        return self.model.precision(self.options.precision)

    @cached_property
    def identity(self) -> str:
        """SHA-256 over all that decides the result's bytes: equal for runs that may share a partial destination."""
        options = self.options
        described = {
            "version": __version__,
            "recipe": self.model.recipe_hash,
            "options": [options.layout.value, options.link.value, options.nextn, options.requantize],
            "precision": sorted(options.precision.items())
            if isinstance(options.precision, Mapping)
            else options.precision,
            "jobs": [
                [
                    job.name,
                    job.nbytes,
                    [[t.info.name, t.info.dtype, t.info.shape, t.module, t.role] for t in job.tensors],
                ]
                for job in self.jobs
            ],
            "copies": [str(path) for path in self.copies],
            "texts": [[str(path), hashlib.sha256(text).hexdigest()] for path, text in self.texts.items()],
            "stamps": sorted([str(s.path), s.size, s.mtime_ns, s.head_sha256] for s in self.stamps.values()),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
