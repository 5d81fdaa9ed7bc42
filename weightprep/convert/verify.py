"""The independent judge of a conversion: reads everything again and believes neither journal nor manifest.

It shares the number formats, the recipe's steps and the plan's arithmetic with the converter, and none of the code
that moved bytes. What must stand in the result follows from the source; every way in which it differs becomes a
finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weightprep import __version__
from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST, Manifest, ModuleRecord, read_manifest
from weightprep.checkpoint.repository import INDEX_NAME, Checkpoint
from weightprep.convert.fileset import check_copy, check_file_set, check_index
from weightprep.convert.module import convert_module
from weightprep.convert.options import SIDECAR_DIR, ConvertOptions, Layout
from weightprep.convert.plan import ConversionPlan, ModuleJob
from weightprep.convert.planner import plan_contents
from weightprep.convert.quality import is_below
from weightprep.convert.reread import Finding, Stored, read_stored, same_bytes, sha256_of
from weightprep.errors import CheckpointError, WeightprepError
from weightprep.recipe import load_recipe

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and what is wrong.

    :param waived: modules below the recipe's floor for which the manifest says that this was allowed
    """

    tensors: int
    modules: int
    files: int
    findings: tuple[Finding, ...]
    waived: tuple[str, ...] = ()


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
    checkpoint = Checkpoint.open(source)
    try:
        manifest = read_manifest(manifest_path)
    except CheckpointError as error:
        if manifest_path.exists():
            return _nothing_compared(Finding(error.subject, error.found, error.wanted))
        swapped = ": are the arguments swapped?" if (source / MANIFEST_NAME).exists() else ""
        return _nothing_compared(Finding(str(manifest_path), f"no manifest{swapped}", "the one that convert writes"))
    if recipe is None:
        load_recipe(manifest.recipe)
    try:
        plan = plan_contents(
            ConvertOptions(
                source=checkpoint.root,
                destination=destination,
                recipe=recipe or manifest.recipe,
                layout=Layout(manifest.layout),
                precision=manifest.precision,
                nextn=manifest.nextn,
                requantize=manifest.requantize,
            )
        )
    except WeightprepError as error:
        # the source is sound and the recipe is there, so it is the manifest's word that does not fit
        return _nothing_compared(Finding(f"{manifest_path}: {error.subject}", error.found, error.wanted))
    judge = _Judge(plan, manifest, manifest_path, destination, on_bytes)
    findings = tuple(judge.findings())
    return Verdict(judge.tensors, len(plan.modules), judge.files, findings, judge.waived)


def _nothing_compared(finding: Finding) -> Verdict:
    return Verdict(0, 0, 0, (finding,))


class _Judge:
    """One verification: the findings are generated in the order of the result's structure."""

    def __init__(
        self,
        plan: ConversionPlan,
        manifest: Manifest,
        manifest_path: Path,
        destination: Path,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.tensors = 0
        self.files = 0
        self.waived: tuple[str, ...] = ()
        self._plan = plan
        self._manifest = manifest
        self._manifest_path = manifest_path
        self._root = destination
        self._on_bytes = on_bytes
        self._records = {record.module: record for record in manifest.modules}
        self._fresh: list[ModuleRecord] = []
        self._absent: set[str] = set()

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong; a file that is missing comes first, and its tensors are not listed."""
        options, checkpoint = self._plan.options, self._plan.checkpoint
        yield from self._file_set()
        source, metadata, faults = _read_all([checkpoint.root / shard for shard in checkpoint.shards])
        yield from faults
        yield from self._repository()
        kept, folder = source, self._root / SIDECAR_DIR
        shards = {job.name for job in self._plan.jobs} if options.layout is Layout.INLINE else {*checkpoint.shards}
        wanted = {self._root / shard: metadata.get(checkpoint.root / shard) for shard in sorted(shards)}
        if not options.in_place:
            kept, written, faults = _read_all(self._root.glob("*.safetensors"))
            yield from faults
            self._absent = {path.name for path in wanted.keys() - written.keys()}
            yield from check_index(self._root, checkpoint.root, kept, self._absent)
            yield from _metadata(wanted, written)
        made = frozenset(info.name for job in self._plan.modules for info in job.outputs.values())
        if options.layout is Layout.SIDECAR:
            yield from self._untouched(source, kept, frozenset(), frozenset())
            sidecar, written, faults = _read_all(folder.glob("*.safetensors"))
            yield from faults
            files = {folder / Path(job.name).name: dict(job.metadata) for job in self._plan.jobs if job.metadata}
            self._absent = {path.name for path in files.keys() - written.keys()}
            yield from _metadata(files, written)
            yield from self._converted(source, sidecar)
            for name in sorted(sidecar.keys() - made):
                yield Finding(
                    f"{sidecar[name].path}: {name}", "a tensor that the recipe does not make", "no such tensor"
                )
        else:
            consumed = frozenset(ref.name for job in self._plan.modules for ref in job.source_refs)
            yield from self._untouched(source, kept, consumed, made)
            yield from self._converted(source, kept)
        yield from self._whole_manifest()

    def _file_set(self) -> Iterator[Finding]:
        plan = self._plan
        wanted = {Path(job.name) for job in plan.jobs}
        if plan.options.in_place:
            yield from check_file_set(self._root / SIDECAR_DIR, wanted | {Path(SIDECAR_MANIFEST.name)})
            return
        wanted |= {*plan.copies, *plan.texts, Path(MANIFEST_NAME)}
        if plan.options.layout is Layout.SIDECAR:
            wanted.add(SIDECAR_MANIFEST)
        yield from check_file_set(self._root, wanted)

    def _whole_manifest(self) -> Iterator[Finding]:
        """Compare with the manifest that a conversion of today writes, once every module has been converted afresh."""
        floors = {job.source.module: job.plan.min_sqnr_db for job in self._plan.modules}
        below = tuple(record.module for record in self._fresh if is_below(record.quality, floors[record.module]))
        found = self._manifest
        if found.quality_loss_allowed:
            self.waived = below
        wanted = found.model_copy(
            update={
                "tool_version": __version__,
                "recipe": self._plan.model.recipe.name,
                "recipe_hash": self._plan.model.recipe_hash,
                "quality_loss_allowed": bool(below),
                "below_floor": below,
                "dropped": self._plan.dropped,
            }
        )
        for key in Manifest.model_fields:
            if key != "modules" and getattr(found, key) != getattr(wanted, key):
                yield Finding(f"{self._manifest_path}: {key}", repr(getattr(found, key)), repr(getattr(wanted, key)))
        modules, planned = (
            [record.module for record in found.modules],
            [job.source.module for job in self._plan.modules],
        )
        if modules != planned and sorted(set(modules)) == sorted(planned):
            yield Finding(f"{self._manifest_path}: modules", "another order, or one twice", "the recipe's order")
        for path in sorted({self._manifest_path, self._root / SIDECAR_MANIFEST}):
            if path.is_file() and path.read_bytes() != found.to_json():
                yield Finding(str(path), "not written as convert writes it", f"the bytes of {MANIFEST_NAME}")

    def _repository(self) -> Iterator[Finding]:
        for relative, original in self._plan.copies.items():
            self.files += 1
            yield from check_copy(self._root / relative, original)
        for relative, text in self._plan.texts.items():
            self.files += 1
            path = self._root / relative
            if relative.name != INDEX_NAME and path.is_file() and path.read_bytes() != text:
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
                if original.path.name not in self._absent:
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
        files = {module.source.module: job.name for job in self._plan.jobs for module in job.modules}
        for job in self._plan.modules:
            record = self._records.get(job.source.module)
            if record is None:
                yield Finding(job.source.module, "no record in the manifest", "one for every converted module")
            else:
                yield from self._module(job, record, files[job.source.module], source, result)

    def _module(
        self,
        job: ModuleJob,
        record: ModuleRecord,
        file: str,
        source: Mapping[str, Stored],
        result: Mapping[str, Stored],
    ) -> Iterator[Finding]:
        for name, digest in record.source_sha256.items():
            if name not in source or sha256_of(source[name]) != digest:
                yield Finding(name, "other bytes in the source", f"sha256 {digest}: the source has changed since")
        try:
            fresh = convert_module(job, self._plan.model.dims, self._plan.options.listed(file))
        except WeightprepError as error:
            yield Finding(error.subject, error.found, error.wanted)
            return
        self._fresh.append(fresh.record)
        for role, info in job.outputs.items():
            self.tensors += 1
            stored = result.get(info.name)
            if stored is None:
                if Path(file).name not in self._absent:
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
        floor, sqnr = job.plan.min_sqnr_db, fresh.record.quality.sqnr_db
        if is_below(fresh.record.quality, floor) and not self._manifest.quality_loss_allowed:
            found = "only noise" if sqnr is None else f"{sqnr:.2f} dB SQNR"
            yield Finding(record.module, found, f"at least {floor:g} dB")


def _read_all(paths: Iterable[Path]) -> tuple[dict[str, Stored], dict[Path, dict[str, str]], list[Finding]]:
    """The tensors of several files, the metadata of those that can be read, and what is wrong."""
    tensors: dict[str, Stored] = {}
    metadata: dict[Path, dict[str, str]] = {}
    findings: list[Finding] = []
    for path in sorted(paths):
        stored, described, faults = read_stored(path)
        findings += faults
        if described is not None:
            metadata[path] = described
        for name in sorted(tensors.keys() & stored.keys()):
            findings.append(Finding(name, f"in {tensors[name].path.name} and in {path.name}", "in one shard"))
        tensors |= stored
    return tensors, metadata, findings


def _metadata(
    wanted: Mapping[Path, Mapping[str, str] | None], found: Mapping[Path, Mapping[str, str]]
) -> Iterator[Finding]:
    for path in sorted(wanted.keys() & found.keys()):
        if found[path] != wanted[path]:
            yield Finding(f"{path}: __metadata__", str(found[path])[:200], str(wanted[path])[:200])
