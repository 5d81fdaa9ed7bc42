"""How a converted tensor is stored so that loaders without weightprep read it right, and the config that tells them so.

A loader decides from `quantization_config` which scale it looks for beside a weight. A tensor in fp8 whose scale it
would not apply is silently some thousand times too large, so a base config that has no way to name the scale is refused
here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from weightprep.checkpoint.config import ModelConfig, find_quantization
from weightprep.checkpoint.exclude import EXCLUDE_KEYS, ExcludeEntry, ExcludeList, draft_names, read_exclude_list
from weightprep.convert.declare import declare
from weightprep.convert.runtime_names import names_to_exclude, towers, unwrapped
from weightprep.errors import CheckpointError
from weightprep.formats.encoding import SCALE_SUFFIXES

__all__ = [
    "Modules",
    "StoredScale",
    "edit_config",
    "edit_hf_quant_config",
    "overridden_entries",
    "storage_for",
    "unmatched_entries",
]

# The fp8 block form that is written where the checkpoint has no quantization_config to follow.
_DEFAULT_BLOCK = (128, 128)
_QUANTIZED_SUFFIXES = (*SCALE_SUFFIXES, ".weight_packed")
# By quant_method, the list of unquantized modules that sglang reads.
_EXCLUDE_KEY: Mapping[object, str] = MappingProxyType(
    {"fp8": "modules_to_not_convert", "quark": "exclude", "compressed-tensors": "ignore"}
)


@dataclass(frozen=True, slots=True)
class StoredScale:
    """The form of the scale of a weight that has one scale for the whole tensor.

    :param suffix: what follows the module's name
    :param block: the scale repeated for every block of this size, [ceil(N/rows), ceil(K/columns)]; None: one number
    :param single: shape of the one number
    """

    suffix: str
    block: tuple[int, int] | None
    single: tuple[int, ...] = ()

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the stored scale of a weight [rows, cols]."""
        if self.block is None:
            return self.single
        return (-(-rows // self.block[0]), -(-cols // self.block[1]))


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of a checkpoint, as far as its quantization_config is concerned.

    :param quantized: those that the conversion stores quantized
    :param widened: those that it stores unquantized
    :param linears: every module with a matrix, in the checkpoint's order
    :param nextn_prefixes: the layers that a draft model holds under other names
    :param wrapper_prefix: what a wrapper puts before the language model's names, "" without one
    """

    quantized: Sequence[str]
    widened: Sequence[str]
    linears: Sequence[str]
    nextn_prefixes: Sequence[str]
    wrapper_prefix: str = ""

    @property
    def others(self) -> list[str]:
        """Every name that a loader may use for a linear that is not one of `quantized`."""
        quantized = set(self.quantized)
        kept = (name for name in self.linears if name not in quantized)
        names = unwrapped(names_to_exclude(kept, self.nextn_prefixes), self.wrapper_prefix)
        return list(dict.fromkeys([*names, *towers(self.linears, self.wrapper_prefix)]))

    @property
    def quantized_names(self) -> list[str]:
        """`quantized`, each also by the names that it has in a draft model and outside a wrapper."""
        names = [name for m in self.quantized for name in (m, *draft_names(m, self.nextn_prefixes))]
        return unwrapped(names, self.wrapper_prefix)

    @property
    def widened_names(self) -> list[str]:
        """Every name that a loader may use for one of `widened`."""
        return unwrapped(names_to_exclude(self.widened, self.nextn_prefixes), self.wrapper_prefix)


def storage_for(config: ModelConfig, kept: Iterable[str], *, is_quantized: bool) -> StoredScale:
    """The form in which the checkpoint's own config lets a per-tensor fp8 scale be found.

    :param kept: names of the tensors that the conversion leaves as they are
    :param is_quantized: whether it stores anything quantized, and needs that form
    :raises CheckpointError: it has no such form, or no list for unquantized modules, or it says nothing of the
        quantized tensors among `kept`, which a config that calls them unquantized would make unreadable
    """
    quantization = config.quantization
    key, _ = find_quantization(config.raw)
    if quantization is None and config.hf_quant_config is None:
        quantized = next((name for name in kept if name.endswith(_QUANTIZED_SUFFIXES)), None)
        if quantized is not None:
            raise CheckpointError(
                f"config.json: {key}",
                found=f"none, and a quantized tensor beside it: {quantized}",
                wanted="a config that says how the source is quantized, to add converted tensors to it",
                remedy="use --layout sidecar, which leaves the checkpoint as it is",
            )
        return StoredScale(".weight_scale_inv", _DEFAULT_BLOCK)
    method = (quantization or {}).get("quant_method")
    if is_quantized and (quantization or {}).get("scale_fmt") == "ue8m0":
        raise CheckpointError(
            f"config.json: {key}",
            found="scale_fmt 'ue8m0': loaders take every scale for a power of two, and round one that is not",
            wanted="scales of any value, because one scale for a whole weight is no power of two",
            remedy="use --layout sidecar, which leaves the checkpoint as it is, or leave fp8 weights as they are "
            "(without --requantize)",
        )
    if method == "fp8" and (config.weight_block_size is not None or not is_quantized):
        return StoredScale(".weight_scale_inv", config.weight_block_size)
    if method == "quark":
        return StoredScale(".weight_scale", None)
    if method == "compressed-tensors":
        return StoredScale(".weight_scale", None, (1,))
    raise CheckpointError(
        f"config.json: {key}" if quantization is not None else "hf_quant_config.json",
        found=f"quant_method {method!r}" + (" without a usable weight_block_size" if method == "fp8" else ""),
        wanted="none, fp8 with weight_block_size, quark or compressed-tensors, to write converted tensors inline",
        remedy="use --layout sidecar, which leaves the checkpoint as it is",
    )


def edit_config(config: ModelConfig, modules: Modules) -> dict[str, Any]:
    """config.json with the quantized modules declared; key order and unknown keys are kept.

    :raises CheckpointError: the config's lists are malformed
    """
    raw: dict[str, Any] = copy.deepcopy(dict(config.raw))
    if config.quantization is None and not modules.quantized:
        return raw
    if config.quantization is None:
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_DEFAULT_BLOCK),
            "modules_to_not_convert": modules.others,
        }
        return raw
    quantization = cast("dict[str, Any]", find_quantization(raw)[1])
    method = quantization.get("quant_method")
    _take_off(quantization, config, modules)
    _put_on(quantization, modules, _EXCLUDE_KEY.get(method))
    if modules.quantized:
        declare(quantization, modules.quantized_names)
    return raw


def edit_hf_quant_config(config: ModelConfig, modules: Modules) -> dict[str, Any] | None:
    """hf_quant_config.json with the quantized modules taken off its exclude list, and those that no longer are put on
    it; None where there is no such file.
    """
    if config.hf_quant_config is None:
        return None
    raw: dict[str, Any] = copy.deepcopy(dict(config.hf_quant_config))
    nested = raw.get("quantization")
    holder = nested if isinstance(nested, dict) else raw
    _take_off(holder, config, modules)
    _put_on(holder, modules, None)
    return raw


def overridden_entries(config: ModelConfig, modules: Modules) -> Mapping[str, str]:
    """Quantized module -> the entry of the checkpoint's own exclude list that asked to leave it alone."""
    listed = read_exclude_list(config, modules.nextn_prefixes)
    entries = {module: listed.entry_for(module) for module in modules.quantized}
    return {module: entry.text for module, entry in entries.items() if entry is not None}


def unmatched_entries(config: ModelConfig, modules: Modules, tensors: Iterable[str]) -> tuple[str, ...]:
    """Entries of the checkpoint's own exclude lists that name nothing in it, given the names of its tensors."""
    return tuple(entry.text for entry in read_exclude_list(config, modules.nextn_prefixes).unmatched(tensors))


def _take_off(holder: dict[str, Any], config: ModelConfig, modules: Modules) -> None:
    """Rewrite the exclude lists in `holder`: an entry that reaches a quantized module is written out for the others."""
    listed = read_exclude_list(config, modules.nextn_prefixes)
    hit = {entry.text for module in modules.quantized for entry in listed.entries_for(module)}
    if not hit:
        return
    spared = _reached(listed, modules.others, hit)
    for key in EXCLUDE_KEYS:
        if isinstance(holder.get(key), list):
            kept: dict[str, None] = {}
            for text in holder[key]:
                kept.update(dict.fromkeys(spared[text] if text in hit else [text]))
            holder[key] = list(kept)


def _put_on(holder: dict[str, Any], modules: Modules, default: str | None) -> None:
    """Add what is stored unquantized to every exclude list in `holder`.

    :param default: the key of a new list, where there is none
    """
    if not modules.widened:
        return
    keys = [key for key in EXCLUDE_KEYS if isinstance(holder.get(key), list)]
    for key in keys or ([default] if default else []):
        holder[key] = list(dict.fromkeys([*(holder.get(key) or []), *modules.widened_names]))


def _reached(listed: ExcludeList, names: Iterable[str], texts: set[str]) -> dict[str, list[str]]:
    reached: dict[str, list[str]] = {text: [] for text in texts}
    for name in names:
        for entry in _unique(listed.entries_for(name)):
            if entry in reached:
                reached[entry].append(name)
    return reached


def _unique(entries: Iterable[ExcludeEntry]) -> set[str]:
    return {entry.text for entry in entries}
