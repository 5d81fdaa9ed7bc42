"""Reads the tensors that `convert --layout sidecar` put beside a checkpoint, each rank only its own rows.

A sidecar is valid for the very weights that it was made from. Its manifest pins them by hash, and the hashes are
checked against the files that are being served, so that a sidecar left behind by another version of the model is never
bound. It pins the sidecar's own tensors too, which no later check would tell from damaged ones as long as they are near
enough to their source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from weightprep.checkpoint.header import read_header
from weightprep.checkpoint.manifest import SIDECAR_MANIFEST, Manifest, ModuleRecord, read_manifest
from weightprep.checkpoint.reader import find_module, read_tensor
from weightprep.checkpoint.repository import Checkpoint, TensorRef, tensor_refs
from weightprep.engines.sglang.options import Options
from weightprep.errors import CheckpointError, EngineError
from weightprep.formats import SCALE_SUFFIXES, WEIGHT_SUFFIXES
from weightprep.recipe import NEXTN_GROUP, ModelPlan
from weightprep.transforms import Bundle
from weightprep.transforms.stored_absorbed import STORED_NAMES, from_linears

__all__ = ["Sidecar", "find_manifest", "open_sidecar"]

_HASHERS = 8
# small enough to be hashed from a core's cache
_PIECE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _Damage:
    """A tensor and its SHA-256; None where it is not there, or not recorded."""

    tensor: str
    found: str | None
    wanted: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sidecar:
    """An opened sidecar.

    :param path: its manifest
    :param model: the checkpoint that it stands beside
    :param records: checkpoint module -> its record
    :param tensors: the sidecar's own tensors
    """

    path: Path
    model: Path
    manifest: Manifest
    records: Mapping[str, ModuleRecord]
    tensors: Mapping[str, TensorRef]

    def __contains__(self, module: object) -> bool:
        return module in self.records

    def rows(self, module: str, rank: int, shards: int, device: torch.device) -> Bundle:
        """Rows of `module` that rank `rank` of `shards` holds, on `device`."""
        if module + STORED_NAMES["w_kc"] in self.tensors:
            return self._absorbed_rows(module, rank, shards, device)
        found = find_module(self.tensors, module)
        if found is None:
            raise CheckpointError(
                f"sidecar of {self.model}: {module}",
                found="a record in the manifest and no tensor",
                wanted="both",
                remedy="convert again: the sidecar is damaged",
            )
        count = found.encoded.rows // shards
        part = found.encoded.slice_rows(rank * count, (rank + 1) * count)
        scale = found.scale
        if scale is not None and part.scale_rows is not None:
            scale = _row_range(scale, *part.scale_rows)
        weight = read_tensor(_row_range(found.weight, rank * count, (rank + 1) * count)).to(device)
        return Bundle.source(weight, None if scale is None else read_tensor(scale).to(device), part.encoded)

    def _absorbed_rows(self, module: str, rank: int, shards: int, device: torch.device) -> Bundle:
        tensors = {}
        for role, suffix in STORED_NAMES.items():
            count = self.tensors[module + suffix].info.shape[0] // shards
            part = _row_range(self.tensors[module + suffix], rank * count, (rank + 1) * count)
            tensors[role] = read_tensor(part).to(device)
        # w_kc has a row for each head and column of rank, and w_vc two columns of rank in a byte
        heads = tensors["w_kc"].shape[0] // (2 * tensors["w_vc"].shape[1])
        return from_linears(tensors, heads)

    def stale(self, modules: list[str]) -> list[str]:
        """Those of `modules` whose weights in the checkpoint are not the ones that they were converted from."""
        checkpoint = Checkpoint.open(self.model)
        return _those(modules, lambda module: not self._matches(module, checkpoint))

    def damaged(self, modules: list[str]) -> list[str]:
        """Those of `modules` whose tensors in the sidecar are not the ones that its manifest records."""
        return _those(modules, lambda module: self._damage(module) is not None)

    def refuse_damaged(self, modules: list[str]) -> None:
        """Name the first tensor that is damaged.

        :param modules: those that `damaged` named, here or on another rank
        :raises EngineError: always, if there are any
        """
        if not modules:
            return
        file = self.path.parent / Path(self.records[modules[0]].file).name
        # a rank on another machine may have another copy of the file
        damage = self._damage(modules[0]) or _Damage(modules[0], "another on another rank", "the same on all")
        more = f" ({len(modules)} modules are damaged)" if len(modules) > 1 else ""
        raise EngineError(
            f"{file}: {damage.tensor}",
            found=f"SHA-256 {damage.found}{more}" if damage.found else "no such tensor",
            wanted=f"SHA-256 {damage.wanted}, as at its conversion" if damage.wanted else "no such tensor",
            remedy=f"`weightprep verify {self.model} {self.path.parent.parent}` says what else differs; "
            'run `weightprep convert --layout sidecar` again, or serve with {"sidecar": "off"}',
        )

    def _damage(self, module: str) -> _Damage | None:
        recorded = self.records[module].target_sha256
        suffixes = (*WEIGHT_SUFFIXES, *SCALE_SUFFIXES, *STORED_NAMES.values())
        # what is read without a record of it is as bad as what is recorded and not there
        read = [name for suffix in suffixes if (name := module + suffix) in self.tensors and name not in recorded]
        for name in (*recorded, *read):
            found = _sha256(self.tensors[name]) if name in self.tensors else None
            if found is None or found != recorded.get(name):
                return _Damage(name, found, recorded.get(name))
        return None

    def _matches(self, module: str, checkpoint: Checkpoint) -> bool:
        recorded = self.records[module].source_sha256
        source = find_module(checkpoint.tensors, module, block_hint=checkpoint.config.weight_block_size)
        if source is None:
            return False
        present = {ref.name: ref for ref in (source.weight, source.scale) if ref is not None}
        # a record that leaves a tensor out vouches for nothing
        return present.keys() == recorded.keys() and all(
            _sha256(ref) == recorded[name] for name, ref in present.items()
        )


def open_sidecar(model: Path, options: Options, plan: ModelPlan) -> Sidecar | None:
    """The sidecar of the checkpoint directory `model`.

    :param options: their `sidecar`: "auto" takes the directory's own if it has one, "off" none; else it is the
        directory that `convert --layout sidecar` made, or the one in it that holds manifest.json
    :param plan: what this server makes of the model, which the sidecar must be made for
    :raises EngineError: it is named and not there, was made with another recipe, precision or choice for NextN, or
        scales are asked for by rank
    :raises CheckpointError: it is damaged
    """
    asked = options.sidecar
    path = find_manifest(model, asked)
    if asked == "off" or (asked == "auto" and not path.is_file()):
        return None
    if not path.is_file():
        raise EngineError(
            f"sidecar {asked}",
            found=f"no {path}",
            wanted="a manifest",
            remedy="give the directory that `weightprep convert --layout sidecar` made",
        )
    if options.scale_scope == "rank":
        raise EngineError(
            path,
            found="a sidecar, whose scales are those of whole tensors",
            wanted='no sidecar with {"scale_scope": "rank"}',
            remedy='serve with {"scale_scope": "rank", "sidecar": "off"}, or leave scale_scope out',
        )
    manifest = read_manifest(path)
    if manifest.recipe_hash != plan.recipe_hash:
        raise EngineError(
            path,
            found=f"recipe {manifest.recipe} with hash {manifest.recipe_hash[:12]}",
            wanted=f"the recipe that this server runs, hash {plan.recipe_hash[:12]}",
            remedy='convert again with this recipe, or serve with {"sidecar": "off"} to convert while loading',
        )
    _refuse_other_choices(path, manifest, plan.precision(options.precision))
    # names beside the manifest, whatever directory the record was written for
    files = sorted({Path(record.file).name for record in manifest.modules})
    headers = {file: read_header(path.parent / file) for file in files}
    records = {record.module: record for record in manifest.modules}
    return Sidecar(path, model, manifest, records, tensor_refs(headers))


def find_manifest(model: Path, asked: str) -> Path:
    """Where the sidecar's manifest is, or would be.

    :param asked: "auto" for that of the checkpoint directory `model`, or a directory: see open_sidecar
    """
    folder = model if asked == "auto" else Path(asked)
    inside = folder / SIDECAR_MANIFEST
    return inside if asked == "auto" or inside.is_file() else folder / SIDECAR_MANIFEST.name


def _refuse_other_choices(path: Path, manifest: Manifest, planned: str | dict[str, str] | None) -> None:
    """What was chosen at conversion is not guessed from the tensors: served as another precision they lose bits.

    A group that the server leaves alone is not read, and may be there.
    """
    made = manifest.precision
    instead: dict[str, object] = {}
    if not isinstance(made, dict) or not isinstance(planned, dict):
        if made != planned:
            instead["precision"] = made
    elif any(made.get(group, name) != name for group, name in planned.items()):
        instead["precision"] = made
    if manifest.nextn == "keep" and isinstance(planned, dict) and NEXTN_GROUP in planned:
        instead["nextn"] = "keep"
    if not instead:
        return
    kept = ", NextN kept" if manifest.nextn == "keep" else ""
    raise EngineError(
        path,
        found=f"made for precision {_by_group(made)}{kept}",
        wanted=f"what this server runs, {_by_group(planned)}",
        remedy=f"serve with --model-loader-extra-config '{json.dumps(instead)}', convert again, "
        'or serve with {"sidecar": "off"} to convert while loading',
    )


def _by_group(precision: str | dict[str, str] | None) -> str:
    if isinstance(precision, dict):
        return ", ".join(f"{group} {name}" for group, name in precision.items())
    return precision or "(none)"


def _those(modules: list[str], is_bad: Callable[[str], bool]) -> list[str]:
    # reading and hashing leave the interpreter to others
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        return [module for module, bad in zip(modules, pool.map(is_bad, modules), strict=True) if bad]


def _row_range(ref: TensorRef, start: int, stop: int) -> TensorRef:
    row = ref.nbytes // ref.info.shape[0]
    begin = ref.info.begin + start * row
    info = dataclasses.replace(
        ref.info, shape=(stop - start, *ref.info.shape[1:]), begin=begin, end=ref.info.begin + stop * row
    )
    return dataclasses.replace(ref, info=info, offset=ref.offset + start * row)


def _sha256(ref: TensorRef) -> str:
    # the file's own bytes, which are those of the tensor in memory
    digest = hashlib.sha256()
    rows = ref.info.shape[0] if ref.info.shape else 1
    step = max(1, _PIECE_BYTES * rows // max(1, ref.nbytes))
    for start in range(0, rows, step):
        piece = _row_range(ref, start, min(start + step, rows)) if ref.info.shape else ref
        digest.update(read_tensor(piece).view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
