"""Makes the plan: which tensors the recipe names, what becomes of each, and every refusal that headers allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightprep.checkpoint.header import TensorInfo
from weightprep.checkpoint.manifest import MANIFEST_NAME
from weightprep.checkpoint.reader import SourceModule, find_module
from weightprep.checkpoint.repository import INDEX_NAME, Checkpoint
from weightprep.checkpoint.writer import describe
from weightprep.convert.coverage import check_coverage, unclaimed_modules
from weightprep.convert.draft_layers import draft_layers, layer_prefix
from weightprep.convert.inline import inline_jobs, inline_texts
from weightprep.convert.options import PARTIAL_SUFFIX, SIDECAR_DIR, ConvertOptions, Layout
from weightprep.convert.plan import ConversionPlan, Fate, ModuleJob, PassedModule, SourceStamp, TensorFate, has_heads
from weightprep.convert.quant_config import Modules, StoredScale, overridden_entries, storage_for, unmatched_entries
from weightprep.convert.runtime_names import linear_modules
from weightprep.convert.sidecar import sidecar_jobs
from weightprep.errors import CheckpointError, RecipeError
from weightprep.formats import Encoding
from weightprep.recipe import ModelPlan, ModulePlan, find_recipe, load_recipe, resolve
from weightprep.recipe.load import shipped_architectures
from weightprep.recipe.resolve import no_architectures
from weightprep.transforms import Form, check_composition
from weightprep.transforms.split_kv_b import kv_b_shape
from weightprep.transforms.stored_absorbed import STORED_NAMES, stored_shapes

__all__ = [
    "find_modules",
    "make_plan",
    "plan_contents",
    "plan_model",
    "split_modules",
]

_SIDECAR_SCALE = StoredScale(".weight_scale", None)


@dataclass(frozen=True, slots=True)
class SplitModules:
    """The modules of a model that are converted, that stay as they are, and whose layers are not there.

    :param names: how config.json may call them
    """

    jobs: tuple[ModuleJob, ...]
    passed: tuple[PassedModule, ...]
    absent: tuple[ModulePlan, ...]
    names: Modules


def plan_model(checkpoint: Checkpoint, options: ConvertOptions) -> ModelPlan:
    """What the recipe, named or found by architecture, asks of this checkpoint.

    :raises RecipeError: no recipe knows the architecture, or the recipe does not fit the config
    """
    if options.recipe is not None:
        recipe = load_recipe(options.recipe)
    elif checkpoint.config.architectures:
        model_type = checkpoint.config.raw.get("model_type")
        recipe = find_recipe(checkpoint.config.architectures[0], model_type if isinstance(model_type, str) else None)
    else:
        raise no_architectures(checkpoint.root / "config.json", sorted(shipped_architectures()))
    return resolve(recipe, checkpoint.config.raw, precision=options.precision, nextn=options.nextn)


def make_plan(options: ConvertOptions, headers: Checkpoint | None = None) -> ConversionPlan:
    """Plan the conversion that `options` ask for; reads headers and configs only, and writes nothing.

    :param headers: the source, where it is not at `options.source`; a plan of one whose files are on the hub can be
        shown, and not executed
    :raises WeightprepError: as :func:`plan_contents`, or the destination cannot be used
    """
    options.check_destination()
    return plan_contents(options, headers)


def plan_contents(options: ConvertOptions, headers: Checkpoint | None = None) -> ConversionPlan:
    """The plan without a look at the destination.

    :param headers: as for :func:`make_plan`
    :raises WeightprepError: the source is no sound checkpoint, or it does not fit the recipe or the layout
    """
    checkpoint = headers or Checkpoint.open(options.source)
    model = plan_model(checkpoint, options)
    split = split_modules(checkpoint, model, options)
    jobs, names = split.jobs, split.names
    if options.layout is Layout.INLINE:
        shards = inline_jobs(checkpoint, jobs)
        texts = inline_texts(checkpoint, shards, names) if jobs else {}
    else:
        shards = sidecar_jobs(checkpoint, jobs, in_place=options.in_place)
        texts = {}
    copies, left = _other_files(checkpoint, options, texts)
    here = checkpoint.root.is_dir()
    stamped = [*(header.path for header in checkpoint.shards.values()), *copies.values()] if here else []
    return ConversionPlan(
        options=options,
        checkpoint=checkpoint,
        model=model,
        jobs=shards,
        copies=copies,
        texts=texts,
        fates=_fates(checkpoint, jobs, split.passed, options.layout),
        stamps={path: SourceStamp.of(path) for path in stamped},
        passed=split.passed,
        absent=split.absent,
        left_behind=tuple(left),
        unmatched_excludes=unmatched_entries(checkpoint.config, names, checkpoint.tensors),
        unclaimed=unclaimed_modules(model, checkpoint.tensors),
    )


def split_modules(checkpoint: Checkpoint, model: ModelPlan, options: ConvertOptions) -> SplitModules:
    """What becomes of each module of `model`, without a look at any file.

    :raises WeightprepError: the checkpoint does not fit the model, or has no form that the layout can store
    """
    found, absent = find_modules(checkpoint, model)
    passed = [
        PassedModule(plan, source, reason)
        for plan, source in found
        if (reason := _pass_reason(plan, source, options)) is not None
    ]
    done = {module.source.module for module in passed}
    todo = [(plan, source) for plan, source in found if source.module not in done]
    made = {source.module: _made(plan, source) for plan, source in todo}
    names = _module_names(checkpoint, model, made)
    overridden = overridden_entries(checkpoint.config, names)
    consumed = {ref.name for _, source in todo for ref in (source.weight, source.scale) if ref is not None}
    kept = [name for name in checkpoint.tensors if name not in consumed]
    scale = _SIDECAR_SCALE
    if todo and options.layout is Layout.INLINE:
        scale = storage_for(checkpoint.config, kept, is_quantized=bool(names.quantized))
    jobs = tuple(_job(plan, source, model.dims, scale, overridden.get(source.module)) for plan, source in todo)
    return SplitModules(jobs, tuple(passed), tuple(absent), names)


def find_modules(
    checkpoint: Checkpoint, model: ModelPlan
) -> tuple[list[tuple[ModulePlan, SourceModule]], list[ModulePlan]]:
    """The modules that the checkpoint has, and those of layers that it does not have at all.

    :raises RecipeError: a layer is there without a module that the recipe wants of it, or a module of such a kind is
        there in a layer that config.json does not count
    """
    check_coverage(model, checkpoint.tensors)
    hint = checkpoint.config.weight_block_size
    layers = {prefix for name in checkpoint.tensors for prefix in _prefixes(name)}
    found: list[tuple[ModulePlan, SourceModule]] = []
    absent: list[ModulePlan] = []
    missing: list[ModulePlan] = []
    for plan in model.modules:
        source = find_module(checkpoint.tensors, plan.source, block_hint=hint)
        if source is not None:
            _check_shape(plan, source, model.dims)
            found.append((plan, source))
        elif plan.optional and layer_prefix(plan) not in layers:
            absent.append(plan)
        else:
            missing.append(plan)
    if missing:
        raise RecipeError(
            f"recipe {model.recipe.name}: {missing[0].source}",
            found=f"{len(found)} of {len(model.modules)} modules in the checkpoint",
            wanted=f"all {len(model.modules)}, as config.json says",
            remedy="check that the recipe fits the model (`weightprep recipes show`) and that the download is complete",
        )
    return found, absent


def _check_shape(plan: ModulePlan, source: SourceModule, dims: Mapping[str, int]) -> None:
    """Find out before the conversion what loading would find out after it.

    :raises CheckpointError: config.json's dims do not fit the weight
    """
    if has_heads(plan):
        found, wanted = (source.encoded.rows, source.encoded.cols), kv_b_shape(dims)
        if found != wanted:
            raise CheckpointError(
                source.weight.name,
                found=f"shape {list(found)}",
                wanted=f"{list(wanted)} for " + ", ".join(f"{name} {size}" for name, size in dims.items()),
                remedy="config.json and the weights belong to different models: take both from one repository",
            )


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: position + 1]) for position, part in enumerate(parts) if part.isdecimal()]


def _made(plan: ModulePlan, source: SourceModule) -> Encoding:
    """In which encoding the result is stored."""
    given = Form(False, frozenset({source.encoded.encoding}))
    (encoding,) = check_composition(plan.store, given, f"{plan.source}: store").encodings
    return encoding


def _pass_reason(plan: ModulePlan, source: SourceModule, options: ConvertOptions) -> str | None:
    stored = source.encoded.encoding
    if not plan.store:
        return f"left in {stored.value}: {plan.precision} is made while loading"
    target = _made(plan, source)
    if stored is not target and not plan.store_for(stored, requantize=options.requantize):
        return f"already {stored.value}; storing it again under one scale costs accuracy for good (--requantize)"
    return f"already {stored.value}" if stored is target else None


def _job(
    plan: ModulePlan, source: SourceModule, dims: Mapping[str, int], scale: StoredScale, overrides: str | None
) -> ModuleJob:
    """:raises CheckpointError: the result has no form that this layout can store."""
    target = _made(plan, source)
    rows, cols = source.encoded.rows, source.encoded.cols
    outputs: dict[str, TensorInfo] = {}
    if target is Encoding.FP8_TENSOR:
        outputs["weight"] = describe(f"{source.module}.weight", "float8_e4m3fn", (rows, cols))
        outputs["scale"] = describe(source.module + scale.suffix, "float32", scale.shape(rows, cols))
    elif target is Encoding.BF16:
        outputs["weight"] = describe(f"{source.module}.weight", "bfloat16", (rows, cols))
    elif scale is not _SIDECAR_SCALE:
        raise CheckpointError(
            source.weight.name,
            found=f"a conversion from {source.encoded.encoding.value} to {target.value}",
            wanted="fp8 with one scale, or bf16, the forms that loaders without weightprep read",
            remedy="use --layout sidecar, or choose another --precision",
        )
    else:
        for role, shape in stored_shapes(dims).items():
            outputs[role] = describe(source.module + STORED_NAMES[role], "uint8", shape)
    return ModuleJob(plan, source, target.value, outputs, overrides)


def _module_names(checkpoint: Checkpoint, model: ModelPlan, made: Mapping[str, Encoding]) -> Modules:
    """:param made: the encoding of each module that is converted"""
    widened = [module for module, encoding in made.items() if encoding is Encoding.BF16]
    quantized = [module for module in made if module not in widened]
    linears = linear_modules((name, ref.shape) for name, ref in checkpoint.tensors.items())
    nextn = draft_layers(checkpoint, model)
    wrapper = model.recipe.wrappers.get(model.architecture)
    return Modules(quantized, widened, linears, nextn, wrapper.prefix if wrapper is not None else "")


def _other_files(
    checkpoint: Checkpoint, options: ConvertOptions, texts: Mapping[Path, bytes]
) -> tuple[dict[Path, Path], list[Path]]:
    """The files that come along, and those that must not: another conversion's, and unindexed weights."""
    if options.in_place:
        return {}, []
    copies: dict[Path, Path] = {}
    left: list[Path] = []
    for relative in checkpoint.other_files:
        ours = relative.parts[0] in (SIDECAR_DIR, SIDECAR_DIR + PARTIAL_SUFFIX, MANIFEST_NAME)
        if ours or relative.suffix == ".safetensors":
            left.append(relative)
        elif relative not in texts:
            copies[relative] = (checkpoint.root / relative).resolve()
    if checkpoint.index_path is not None and Path(INDEX_NAME) not in texts:
        copies[Path(INDEX_NAME)] = checkpoint.index_path.resolve()
    return copies, left


def _fates(
    checkpoint: Checkpoint, jobs: Sequence[ModuleJob], passed: Sequence[PassedModule], layout: Layout
) -> tuple[TensorFate, ...]:
    """One fate for every tensor of the source."""
    if layout is Layout.SIDECAR:
        return tuple(
            TensorFate(name, Fate.PASSED, "sidecar: the checkpoint stays as it is") for name in checkpoint.tensors
        )
    fates: dict[str, TensorFate] = {}
    for job in jobs:
        rule = f"{job.source.encoded.encoding.value} -> {job.target_encoding}"
        kept = {info.name for info in job.outputs.values()}
        for ref in job.source_refs:
            fate = Fate.TRANSFORMED if ref.name in kept else Fate.DROPPED
            fates[ref.name] = TensorFate(
                ref.name, fate, rule if ref.name in kept else "its weight has another scale, or none"
            )
    for module in passed:
        for ref in (module.source.weight, *((module.source.scale,) if module.source.scale else ())):
            fates[ref.name] = TensorFate(ref.name, Fate.PASSED, module.reason)
    return tuple(
        fates.get(name) or TensorFate(name, Fate.PASSED, "not named by the recipe") for name in checkpoint.tensors
    )
