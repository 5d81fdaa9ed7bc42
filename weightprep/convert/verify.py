"""The independent judge of a conversion: reads everything again and believes neither journal nor manifest.

It shares the number formats, the recipe's steps and the plan's arithmetic with the converter, and none of the code
that moved bytes. What must stand in the result follows from the source; every way in which it differs becomes a
finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from weightprep import __version__
from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST, Manifest, ModuleRecord, read_manifest
from weightprep.checkpoint.repository import Checkpoint
from weightprep.convert.declared import check_declared
from weightprep.convert.files import Progress, Unwatched
from weightprep.convert.fileset import check_file_set, check_index, check_repository
from weightprep.convert.in_order import in_order
from weightprep.convert.manifest_check import below_floor, check_manifest, check_recipe_is_found
from weightprep.convert.module import convert_module
from weightprep.convert.options import SIDECAR_DIR, ConvertOptions, Layout
from weightprep.convert.plan import ConversionPlan, ModuleJob
from weightprep.convert.planner import plan_contents
from weightprep.convert.quality import describe, is_below
from weightprep.convert.reread import Finding, Stored, check_metadata, linked_files, read_all, same_bytes, sha256_of
from weightprep.errors import CheckpointError, WeightprepError

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and what is wrong.

    :param tensors: those that were read in both; of a shard that is the source's own file there is only one
    :param waived: modules below the recipe's floor for which manifest and caller both say that this is allowed
    :param notes: what differs and harms nothing
    """

    tensors: int
    modules: int
    files: int
    findings: tuple[Finding, ...]
    waived: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def verify(
    source: Path,
    destination: Path,
    *,
    recipe: str | None = None,
    allow_quality_loss: bool = False,
    workers: int = 1,
    watch: Callable[[int], AbstractContextManager[Progress]] = lambda _: nullcontext(Unwatched()),
) -> Verdict:
    """Compare `destination` with what a conversion of `source` must have made.

    :param recipe: name or file of the recipe, where the manifest's name does not find it
    :param allow_quality_loss: take a manifest's word that a module may be below its floor; anyone can write that word
    :param workers: tensors that are compared, or modules that are converted afresh, at once
    :param watch: called with the number of bytes to compare; what it gives is told how far the work is
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
        check_recipe_is_found(manifest.recipe, manifest_path)
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
    notes: tuple[str, ...] = ()
    if manifest.tool_version != __version__:
        notes = (f"made by weightprep {manifest.tool_version}, judged by {__version__}",)
    with watch(_bytes_to_compare(plan)) as progress, ThreadPoolExecutor(workers) as pool:
        judge = _Judge(plan, manifest, manifest_path, destination, allow_quality_loss, pool, progress)
        try:
            findings = tuple(judge.findings())
        finally:
            pool.shutdown(cancel_futures=True)
    if judge.linked:
        own = f"{judge.linked} shard(s) are the source's own files (hard links): nothing to compare them with"
        notes = (*notes, own)
    files = len(plan.copies) + len(plan.texts)
    return Verdict(judge.tensors, len(plan.modules), files, findings, judge.waived, notes)


def _bytes_to_compare(plan: ConversionPlan) -> int:
    made = sum(info.nbytes for job in plan.modules for info in job.outputs.values())
    consumed = sum(ref.nbytes for job in plan.modules for ref in job.source_refs)
    kept = sum(ref.nbytes for ref in plan.checkpoint.tensors.values())
    return kept + made - (consumed if plan.options.layout is Layout.INLINE else 0)


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
        allow_quality_loss: bool,
        pool: ThreadPoolExecutor,
        progress: Progress,
    ) -> None:
        self.tensors = 0
        self.linked = 0
        self.waived: tuple[str, ...] = ()
        self._plan = plan
        self._manifest = manifest
        self._manifest_path = manifest_path
        self._root = destination
        self._allow_quality_loss = allow_quality_loss
        self._pool = pool
        self._progress = progress
        self._records = {record.module: record for record in manifest.modules}
        self._fresh: list[ModuleRecord] = []
        self._absent: set[str] = set()

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong; a file that is missing comes first, and its tensors are not listed."""
        options, checkpoint = self._plan.options, self._plan.checkpoint
        yield from self._file_set()
        source, metadata, faults = read_all([checkpoint.root / shard for shard in checkpoint.shards])
        yield from faults
        yield from check_repository(self._root, self._plan.copies, self._plan.texts)
        kept, folder = source, self._root / SIDECAR_DIR
        shards = {job.name for job in self._plan.jobs} if options.layout is Layout.INLINE else {*checkpoint.shards}
        wanted = {self._root / shard: metadata.get(checkpoint.root / shard) for shard in sorted(shards)}
        if not options.in_place:
            kept, written, faults = read_all(self._root.glob("*.safetensors"))
            yield from faults
            self._absent = {path.name for path in wanted.keys() - written.keys()}
            yield from check_index(self._root, checkpoint.root, kept, self._absent)
            yield from check_metadata(wanted, written)
        made = frozenset(info.name for job in self._plan.modules for info in job.outputs.values())
        if options.layout is Layout.SIDECAR:
            yield from self._untouched(source, kept, frozenset(), frozenset())
            sidecar, written, faults = read_all(folder.glob("*.safetensors"))
            yield from faults
            files = {folder / Path(job.name).name: dict(job.metadata) for job in self._plan.jobs if job.metadata}
            self._absent = {path.name for path in files.keys() - written.keys()}
            yield from check_metadata(files, written)
            yield from self._converted(source, sidecar)
            for name in sorted(sidecar.keys() - made):
                yield Finding(
                    f"{sidecar[name].path}: {name}", "a tensor that the recipe does not make", "no such tensor"
                )
        else:
            consumed = frozenset(ref.name for job in self._plan.modules for ref in job.source_refs)
            yield from self._untouched(source, kept, consumed, made)
            yield from self._converted(source, kept)
            modules = [job.source.module for job in self._plan.modules]
            yield from check_declared(self._root, kept, modules, is_whole=checkpoint.config.quantization is None)
        manifest = self._manifest
        copies = {self._root / SIDECAR_MANIFEST}
        yield from check_manifest(manifest, self._manifest_path, copies, self._plan, self._fresh)
        if manifest.quality_loss_allowed and self._allow_quality_loss:
            self.waived = below_floor(self._plan, self._fresh)

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

    def _untouched(
        self, source: Mapping[str, Stored], result: Mapping[str, Stored], consumed: frozenset[str], made: frozenset[str]
    ) -> Iterator[Finding]:
        kept = [tensor for name, tensor in source.items() if name not in consumed]
        linked = linked_files(kept, result)
        self.tensors += sum(tensor.path not in linked for tensor in kept)
        self.linked = 0 if self._plan.options.in_place else len(linked)

        def compare(original: Stored) -> list[Finding]:
            name, copy = original.name, result.get(original.name)
            if copy is None:
                if original.path.name in self._absent:
                    return []
                return [Finding(name, "no such tensor in the result", f"the tensor of {original.path.name}")]
            if (copy.dtype, copy.shape) != (original.dtype, original.shape):
                return [Finding(name, f"{copy.dtype} {copy.shape}", f"{original.dtype} {original.shape}")]
            if not same_bytes(original, copy):
                return [Finding(f"{copy.path}: {name}", "other bytes", f"the bytes in {original.path}")]
            return []

        for findings in in_order(
            self._pool, self._progress, compare, kept, lambda tensor: (tensor.path.name, tensor.end - tensor.begin)
        ):
            yield from findings
        for name in sorted(result.keys() - (source.keys() - consumed) - made):
            yield Finding(f"{result[name].path}: {name}", "a tensor that nothing accounts for", "no such tensor")

    def _converted(self, source: Mapping[str, Stored], result: Mapping[str, Stored]) -> Iterator[Finding]:
        planned = {job.source.module for job in self._plan.modules}
        for module in sorted(self._records.keys() - planned):
            yield Finding(module, "a record of a conversion", "none: the recipe does not convert it")
        files = {module.source.module: job.name for job in self._plan.jobs for module in job.modules}

        def afresh(job: ModuleJob) -> list[Finding]:
            record = self._records.get(job.source.module)
            if record is None:
                return [Finding(job.source.module, "no record in the manifest", "one for every converted module")]
            return list(self._module(job, record, files[job.source.module], source, result))

        jobs = self._plan.modules
        self.tensors += sum(len(job.outputs) for job in jobs if job.source.module in self._records)
        sizes = {job.source.module: sum(info.nbytes for info in job.outputs.values()) for job in jobs}
        for findings in in_order(
            self._pool, self._progress, afresh, jobs, lambda job: (files[job.source.module], sizes[job.source.module])
        ):
            yield from findings
        order = {job.source.module: number for number, job in enumerate(jobs)}
        self._fresh.sort(key=lambda record: order[record.module])

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
            stored = result.get(info.name)
            if stored is None:
                if Path(file).name not in self._absent:
                    yield Finding(info.name, "no such tensor in the result", f"{info.dtype} {info.shape}")
                continue
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
        allowed = self._manifest.quality_loss_allowed and self._allow_quality_loss
        if is_below(fresh.record.quality, floor) and not allowed:
            more = " (or --allow-quality-loss: the manifest says it may be below)"
            wanted = f"at least {floor:g} dB" + (more if self._manifest.quality_loss_allowed else "")
            yield Finding(record.module, describe(fresh.record.quality), wanted)
