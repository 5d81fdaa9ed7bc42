"""Whether the result's own config says of its tensors what they are: a loader believes it, and asks nobody else.

Reads the configs of the result and the headers of its shards, as loaders do. The code that edits configs is judged
here, so of what it uses only the matcher of exclude lists is; comparing with its output would not see its faults.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from weightprep.checkpoint.config import CONFIG_NAME, ModelConfig, find_quantization, read_config
from weightprep.checkpoint.exclude import FUSED, ExcludeEntry, ExcludeList, draft_names, pattern_of, read_exclude_list
from weightprep.convert.reread import Finding, Stored
from weightprep.errors import CheckpointError

__all__ = ["check_declared"]

_FP8 = "F8_E4M3"
_LAYER = re.compile(r"(.*?\blayers)\.(\d{1,6})\.")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
# sglang builds the language model of a wrapper as "model.", transformers as "model.language_model.".
_WRAPPED = ("language_model.", "model.language_model.")
# What compressed-tensors calls a kind of module instead of modules; asked for after every name.
_KIND = "Linear"


@dataclass(frozen=True, slots=True)
class _Form:
    """The fp8 weight that a config declares: where its scale is, and the block of each scale, None for one scale."""

    suffix: str
    block: tuple[int, int] | None = None

    def fits(self, weight: Stored, scale: Stored | None) -> bool:
        """Whether the stored tensors are of this form."""
        if scale is None or len(weight.shape) != 2:
            return False
        if self.block is None:
            return math.prod(scale.shape) == 1
        return scale.shape == tuple(-(-size // edge) for size, edge in zip(weight.shape, self.block, strict=True))

    def __str__(self) -> str:
        many = f"one for every block of {self.block[0]}x{self.block[1]}" if self.block else "one for the weight"
        return f"fp8 with scales named *{self.suffix}, {many}"


def check_declared(
    root: Path, tensors: Mapping[str, Stored], converted: Collection[str], *, is_whole: bool
) -> Iterator[Finding]:
    """Compare what the configs below `root` declare with its `tensors`.

    :param converted: modules that the conversion stores, in fp8 or unquantized
    :param is_whole: whether the whole quantization_config is the conversion's, which then must name every matrix that
        stays as it is
    """
    try:
        config = read_config(root)
        # Without the draft model's layers: it is asked for by its own names, one after the other.
        excluded = read_exclude_list(config)
        drafts = _draft_layers(config, tensors, converted)
        result = _Result(f"{root / CONFIG_NAME}", config, excluded, drafts, tensors, converted)
        yield from result.misread()
        if is_whole and config.quantization is not None:
            yield from result.unnamed()
    except CheckpointError as error:
        yield Finding(error.subject, error.found, error.wanted)


@dataclass(frozen=True, slots=True)
class _Result:
    """What is compared.

    :param drafts: the layers that a draft model holds ("model.layers.78")
    """

    file: str
    config: ModelConfig
    excluded: ExcludeList
    drafts: tuple[str, ...]
    tensors: Mapping[str, Stored]
    converted: Collection[str]

    def misread(self) -> Iterator[Finding]:
        """Converted weights that a loader would take for something else."""
        key, _ = find_quantization(self.config.raw)
        for module in self.converted:
            weight = self.tensors.get(f"{module}.weight")
            if weight is None:
                # A shard that is missing or cannot be read: told elsewhere.
                continue
            for name in _asked(module, self.drafts):
                if (fault := self._fault(name, module, weight)) is not None:
                    called = "" if name == module else f" (as {name})"
                    yield Finding(f"{self.file}: {key}: {module}{called}", fault, f"what is stored: {weight.dtype}")
                    break

    def _fault(self, name: str, module: str, weight: Stored) -> str | None:
        """What a loader that asks for `name` takes the `weight` of `module` for; None where that is what it is."""
        quantization = self.config.quantization or {}
        entry = self.excluded.entry_for(name)
        if entry is not None:
            has = f"{entry.file} leaves it unquantized: {entry.key} has {entry.text!r}"
            return has if weight.dtype == _FP8 else None
        if weight.dtype != _FP8 and not quantization:
            return None
        declared = _READERS.get(quantization.get("quant_method"), _unknown)(quantization, name)
        scale = self.tensors.get(f"{module}{declared.suffix}") if isinstance(declared, _Form) else None
        if isinstance(declared, _Form) and weight.dtype == _FP8 and declared.fits(weight, scale):
            return None
        return f"declared as {declared}"

    def unnamed(self) -> Iterator[Finding]:
        """Matrices that are stored unquantized and that a loader would take for quantized by a name that it uses."""
        entries = frozenset(entry.text for entry in self.excluded.entries)
        made = {f"{module}.weight" for module in self.converted}
        quantized = {name for name in made if name in self.tensors and self.tensors[name].dtype == _FP8}
        matrices = (name for name, tensor in self.tensors.items() if _is_matrix(tensor) and name not in quantized)
        left = {name.removesuffix(".weight"): None for name in matrices}
        names = dict.fromkeys(found[1] if (found := _EXPERT.match(module)) else module for module in left)
        names.update(dict.fromkeys([*_fused(names)]))
        if any(module.startswith(_WRAPPED) for module in self.converted):
            # Loaders change the names inside of what stands beside the language model.
            beside = (module.removeprefix("model.") for module in left if not module.startswith(_WRAPPED))
            names.update(dict.fromkeys(module.split(".")[0] for module in beside))
        for module in names:
            missed = next((name for name in _asked(module, self.drafts) if not _is_named(name, entries)), None)
            if missed is not None:
                wanted = "an entry of the exclude list, because it is stored unquantized"
                yield Finding(f"{self.file}: {module}", f"nothing that excludes {missed}", wanted)


def _is_matrix(tensor: Stored) -> bool:
    return tensor.name.endswith(".weight") and len(tensor.shape) >= 2


def _fused(modules: Collection[str]) -> Iterator[str]:
    """What loaders call several of `modules` together."""
    for module in modules:
        parent, dot, last = module.rpartition(".")
        for fused, parts in FUSED.items():
            if last == parts[0] and all(parent + dot + part in modules for part in parts):
                yield parent + dot + fused


def _is_named(name: str, entries: Collection[str]) -> bool:
    """Whether an entry is `name`, or a run of whole parts of it: the narrowest reading of an fp8 list."""
    parts = name.split(".")
    count = len(parts)
    return any(".".join(parts[a:b]) in entries for a in range(count) for b in range(a + 1, count + 1))


def _draft_layers(config: ModelConfig, tensors: Collection[str], converted: Collection[str]) -> tuple[str, ...]:
    """The layers behind the last one that config.json counts: a draft model holds them under names of its own."""
    text = config.raw.get("text_config")
    count = (text if isinstance(text, dict) and "num_hidden_layers" in text else config.raw).get("num_hidden_layers")
    if type(count) is not int:
        return ()
    heads = {found[1] for module in converted if (found := _LAYER.match(module))}
    layers = {(found[1], int(found[2])) for name in tensors if (found := _LAYER.match(name)) and found[1] in heads}
    return tuple(f"{head}.{number}" for head, number in sorted(layers) if number >= count)


def _asked(module: str, drafts: Collection[str]) -> list[str]:
    """Every name by which a loader asks for `module`."""
    names = [module, *draft_names(module, drafts)]
    wrapper = next((prefix for prefix in _WRAPPED if module.startswith(prefix)), None)
    if wrapper is not None:
        bare = module.removeprefix(wrapper)
        inside = bare.removeprefix("model.")
        is_inside = bare.startswith("model.") or wrapper.startswith("model.")
        names += [f"model.{inside}", f"model.language_model.{inside}"] if is_inside else [bare]
    return list(dict.fromkeys(names))


def _unknown(quantization: Mapping[str, object], _: str) -> str:
    return f"quant_method {quantization.get('quant_method')!r}"


def _fp8(quantization: Mapping[str, object], _: str) -> _Form | str:
    if quantization.get("scale_fmt") == "ue8m0":
        return "fp8 with powers of two as scales"
    if (scheme := quantization.get("activation_scheme", "dynamic")) != "dynamic":
        return f"fp8 with activation_scheme {scheme!r}, whose scales nobody stored"
    block = quantization.get("weight_block_size")
    if block is None:
        return _Form(".weight_scale")
    if not isinstance(block, list) or len(block) != 2 or not all(type(edge) is int and edge > 0 for edge in block):
        return f"fp8 in blocks of {block!r}"
    return _Form(".weight_scale_inv", (block[0], block[1]))


def _quark(quantization: Mapping[str, object], name: str) -> _Form | str:
    """The first pattern that matches decides, and where none does the checkpoint's own scheme."""
    layers = _object(quantization.get("layer_quant_config"))
    spec = next((layers[pattern] for pattern in layers if fnmatch.fnmatchcase(name, pattern)), None)
    scheme = _object(quantization.get("global_quant_config") if spec is None else spec)
    weight, inputs = _object(scheme.get("weight")), _object(scheme.get("input_tensors"))
    found = (weight.get("dtype"), weight.get("qscheme"), weight.get("is_dynamic", False))
    if found != ("fp8_e4m3", "per_tensor", False):
        return f"{found[0]} {found[1]}"
    if (inputs.get("dtype"), inputs.get("is_dynamic")) != ("fp8_e4m3", True):
        return "fp8_e4m3 per_tensor without activations in dynamic fp8"
    return _Form(".weight_scale")


def _compressed_tensors(quantization: Mapping[str, object], name: str) -> _Form | str:
    """The first target that fits decides, over all groups; kinds of modules come after names."""
    groups = {key: _object(group) for key, group in _object(quantization.get("config_groups")).items()}
    key = next((key for key, group in groups.items() if _fits(name, key, group)), None)
    if key is None:
        key = next((key for key, group in groups.items() if _KIND in _list(group.get("targets"))), None)
    if key is None:
        return "nothing: no target fits it"
    weights, inputs = _object(groups[key].get("weights")), groups[key].get("input_activations")
    form = tuple(weights.get(field) for field in ("type", "num_bits", "strategy"))
    layout = groups[key].get("format") or quantization.get("format")
    if (form, layout) != (("float", 8, "tensor"), "float-quantized") or weights.get("dynamic"):
        return f"{form[0]} of {form[1]} bits, one scale per {form[2]}, {layout}, by {key}"
    if inputs is not None and not _object(inputs).get("dynamic"):
        return f"fp8 with scales of its activations, which nobody stored, by {key}"
    return _Form(".weight_scale")


def _fits(name: str, key: str, group: Mapping[str, object]) -> bool:
    for target in _list(group.get("targets")):
        text = str(target)
        if not text.startswith("re:"):
            if text == name:
                return True
        elif (pattern := pattern_of(ExcludeEntry(text, CONFIG_NAME, f"config_groups.{key}"))) and pattern.match(name):
            return True
    return False


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


_READERS: Mapping[object, Callable[[Mapping[str, object], str], _Form | str]] = MappingProxyType(
    {"fp8": _fp8, "quark": _quark, "compressed-tensors": _compressed_tensors}
)
