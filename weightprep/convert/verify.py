"""The independent judge of a conversion: reads everything again and believes neither journal nor manifest.

It shares the number formats, the recipe's steps and the plan's arithmetic with the converter, and none of the code
that moved bytes. What must stand in the result follows from the source; every way in which it differs becomes a
finding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST, Manifest, ModuleRecord, read_manifest
from weightprep.checkpoint.repository import INDEX_NAME
from weightprep.convert.module import convert_module
from weightprep.convert.options import SIDECAR_DIR, ConvertOptions, Layout
from weightprep.convert.plan import ConversionPlan, ModuleJob
from weightprep.convert.planner import plan_contents
from weightprep.convert.reread import Finding, Stored, read_stored, same_bytes, sha256_of
from weightprep.errors import CheckpointError, WeightprepError

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and what is wrong."""

    tensors: int
    modules: int
    files: int
    findings: tuple[Finding, ...]


def verify(
    source: Path, destination: Path, *, recipe: str | None = None, on_bytes: Callable[[int], None] = lambda _: None
) -> Verdict:
    """Compare `destination` with what a conversion of `source` must have made.

    :param recipe: name or file of the recipe, where the manifest's name does not find it
    :param on_bytes: called with the sizes of compared tensors
    :raises CheckpointError: the source is no sound checkpoint, or the destination is no directory
    :raises RecipeError: the recipe cannot be found
    """
    if not destination.is_dir():
        raise CheckpointError(
            destination,
            found="no directory",
            wanted="a converted checkpoint",
            remedy="pass the directory that convert wrote",
        )
    in_place = source.resolve() == destination.resolve()
    manifest_path = destination / (SIDECAR_MANIFEST if in_place else MANIFEST_NAME)
    try:
        manifest = read_manifest(manifest_path)
    except CheckpointError as error:
        return Verdict(0, 0, 0, (Finding(error.subject, error.found, error.wanted),))
    plan = plan_contents(
        ConvertOptions(
            source=source,
            destination=destination,
            recipe=recipe or manifest.recipe,
            layout=Layout(manifest.layout),
            precision=manifest.precision,
            nextn=manifest.nextn,
            requantize=manifest.requantize,
        )
    )
    judge = _Judge(plan, manifest, destination, on_bytes)
    findings = tuple(judge.findings())
    return Verdict(judge.tensors, len(plan.modules), judge.files, findings)


class _Judge:
    """One verification: the findings are generated in the order of the result's structure."""

    def __init__(
        self, plan: ConversionPlan, manifest: Manifest, destination: Path, on_bytes: Callable[[int], None]
    ) -> None:
        self.tensors = 0
        self.files = 0
        self._plan = plan
        self._manifest = manifest
        self._root = destination
        self._on_bytes = on_bytes
        self._records = {record.module: record for record in manifest.modules}

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong."""
        if self._manifest.recipe_hash != self._plan.model.recipe_hash:
            yield Finding(
                f"recipe {self._manifest.recipe}", f"hash {self._plan.model.recipe_hash}", self._manifest.recipe_hash
            )
        source, metadata, faults = _read_all(self._plan.checkpoint.root, self._plan.checkpoint.shards)
        yield from faults
        yield from self._repository()
        if not self._plan.options.in_place:
            result, result_metadata, faults = _read_all(self._root, [p.name for p in self._root.glob("*.safetensors")])
            yield from faults
            yield from _index(self._root, result)
            for shard, wanted in metadata.items():
                if result_metadata.get(shard, wanted) != wanted:
                    yield Finding(f"{shard}: __metadata__", str(result_metadata[shard])[:200], str(wanted)[:200])
        else:
            result = source
        made = frozenset(info.name for job in self._plan.modules for info in job.outputs.values())
        if self._plan.options.layout is Layout.SIDECAR:
            folder = self._root / SIDECAR_DIR
            sidecar, _, faults = _read_all(folder, [p.name for p in folder.glob("*.safetensors")])
            yield from faults
            yield from self._manifest_copies()
            yield from self._untouched(source, result, frozenset(), frozenset())
            yield from self._converted(source, sidecar)
            for name in sorted(sidecar.keys() - made):
                yield Finding(
                    f"{sidecar[name].path}: {name}", "a tensor that the recipe does not make", "no such tensor"
                )
        else:
            consumed = frozenset(ref.name for job in self._plan.modules for ref in job.source_refs)
            yield from self._untouched(source, result, consumed, made)
            yield from self._converted(source, result)

    def _manifest_copies(self) -> Iterator[Finding]:
        path = self._root / SIDECAR_MANIFEST
        if not path.is_file() or path.read_bytes() != self._manifest.to_json():
            yield Finding(str(path), "not the manifest of this conversion", f"the same as {MANIFEST_NAME}")

    def _repository(self) -> Iterator[Finding]:
        for relative, original in self._plan.copies.items():
            self.files += 1
            copy = self._root / relative
            if not copy.is_file():
                yield Finding(str(copy), "no such file", f"a copy of {original}")
            elif _file_sha256(copy) != _file_sha256(original):
                yield Finding(str(copy), "other bytes", f"the bytes of {original}")
        for relative, text in self._plan.texts.items():
            self.files += 1
            path = self._root / relative
            if relative.name != INDEX_NAME and (not path.is_file() or path.read_bytes() != text):
                yield Finding(str(path), "a config that does not declare what the tensors are", "the source's, edited")

    def _untouched(
        self, source: Mapping[str, Stored], result: Mapping[str, Stored], consumed: frozenset[str], made: frozenset[str]
    ) -> Iterator[Finding]:
        for name, original in source.items():
            if name in consumed:
                continue
            self.tensors += 1
            copy = result.get(name)
            if copy is None:
                yield Finding(name, "no such tensor in the result", f"the tensor of {original.path.name}")
            elif (copy.dtype, copy.shape) != (original.dtype, original.shape):
                yield Finding(name, f"{copy.dtype} {copy.shape}", f"{original.dtype} {original.shape}")
            elif not same_bytes(original, copy):
                yield Finding(f"{copy.path}: {name}", "other bytes", f"the bytes in {original.path}")
            self._on_bytes(original.end - original.begin)
        for name in sorted(result.keys() - (source.keys() - consumed) - made):
            yield Finding(f"{result[name].path}: {name}", "a tensor that nothing accounts for", "no such tensor")

    def _converted(self, source: Mapping[str, Stored], result: Mapping[str, Stored]) -> Iterator[Finding]:
        planned = {job.source.module for job in self._plan.modules}
        for module in sorted(self._records.keys() - planned):
            yield Finding(module, "a record of a conversion", "none: the recipe does not convert it")
        for job in self._plan.modules:
            record = self._records.get(job.source.module)
            if record is None:
                yield Finding(job.source.module, "no record in the manifest", "one for every converted module")
            else:
                yield from self._module(job, record, source, result)

    def _module(
        self, job: ModuleJob, record: ModuleRecord, source: Mapping[str, Stored], result: Mapping[str, Stored]
    ) -> Iterator[Finding]:
        for name, digest in record.source_sha256.items():
            if name not in source or sha256_of(source[name]) != digest:
                yield Finding(name, "other bytes in the source", f"sha256 {digest}: the source has changed since")
        try:
            fresh = convert_module(job, self._plan.model.dims, record.file)
        except WeightprepError as error:
            yield Finding(error.subject, error.found, error.wanted)
            return
        for role, info in job.outputs.items():
            self.tensors += 1
            stored = result.get(info.name)
            if stored is None:
                yield Finding(info.name, "no such tensor in the result", f"{info.dtype} {info.shape}")
                continue
            self._on_bytes(stored.end - stored.begin)
            if (stored.dtype, stored.shape) != (info.dtype, info.shape):
                yield Finding(info.name, f"{stored.dtype} {stored.shape}", f"{info.dtype} {info.shape}")
            elif sha256_of(stored) != fresh.record.target_sha256[info.name]:
                yield Finding(
                    f"{stored.path}: {info.name}", f"other bytes for the {role}", "those of a fresh conversion"
                )
        if record != fresh.record:
            yield Finding(
                f"{record.module}: manifest", "figures or hashes that are not its own", "those of a fresh conversion"
            )
        floor = job.plan.min_sqnr_db
        sqnr = fresh.record.quality.sqnr_db
        if floor is not None and sqnr is not None and sqnr < floor and not self._manifest.quality_loss_allowed:
            yield Finding(record.module, f"{sqnr:.2f} dB SQNR", f"at least {floor:g} dB")


def _read_all(
    root: Path, names: Mapping[str, object] | list[str]
) -> tuple[dict[str, Stored], dict[str, dict[str, str]], list[Finding]]:
    tensors: dict[str, Stored] = {}
    metadata: dict[str, dict[str, str]] = {}
    findings: list[Finding] = []
    for shard in sorted(names):
        stored, metadata[shard], faults = read_stored(root / shard)
        findings += faults
        for name in sorted(tensors.keys() & stored.keys()):
            findings.append(Finding(name, f"in {tensors[name].path.name} and in {shard}", "in one shard"))
        tensors |= stored
    return tensors, metadata, findings


def _index(root: Path, tensors: Mapping[str, Stored]) -> Iterator[Finding]:
    path = root / INDEX_NAME
    if not path.exists():
        if len({tensor.path for tensor in tensors.values()}) > 1:
            yield Finding(str(path), "no index for several shards", "an index")
        return
    try:
        index = json.loads(path.read_bytes())
        weight_map = dict(index["weight_map"])
        total = index.get("metadata", {}).get("total_size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield Finding(str(path), f"no index ({type(error).__name__})", "a weight_map")
        return
    for name in sorted(weight_map.keys() ^ tensors.keys()):
        where = "in the index only" if name in weight_map else "in a shard only"
        yield Finding(f"{path}: {name}", where, "in both")
    for name in sorted(weight_map.keys() & tensors.keys()):
        if weight_map[name] != tensors[name].path.name:
            yield Finding(f"{path}: {name}", f"the index says {weight_map[name]}", tensors[name].path.name)
    size = sum(tensor.end - tensor.begin for tensor in tensors.values())
    if total is not None and total != size:
        yield Finding(f"{path}: total_size", str(total), str(size))


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
