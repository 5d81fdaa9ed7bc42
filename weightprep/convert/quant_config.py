"""How a converted tensor is stored so that loaders without weightprep read it right, and the config that tells them so.

A loader decides from `quantization_config` which scale it looks for beside a weight. A tensor in fp8 whose scale it
would not apply is silently some thousand times too large, so a base config that has no way to name the scale is
refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightprep.checkpoint.config import ModelConfig
from weightprep.checkpoint.exclude import EXCLUDE_KEYS, ExcludeList, read_exclude_list
from weightprep.convert.runtime_names import names_to_exclude
from weightprep.errors import CheckpointError

__all__ = ["Modules", "StoredScale", "edit_config", "overridden_entries", "storage_for"]

# The fp8 block form that is written where the checkpoint has no quantization_config to follow.
_DEFAULT_BLOCK = (128, 128)
_EXCLUDE = "modules_to_not_convert"


@dataclass(frozen=True, slots=True)
class StoredScale:
    """The form of the scale of a weight that has one scale for the whole tensor.

    :param suffix: what follows the module's name
    :param block: the scale repeated for every block of this size, [ceil(N/rows), ceil(K/columns)]; None: one number
    """

    suffix: str
    block: tuple[int, int] | None

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the stored scale of a weight [rows, cols]."""
        if self.block is None:
            return ()
        return (-(-rows // self.block[0]), -(-cols // self.block[1]))


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of a checkpoint, as far as an exclude list is concerned.

    :param quantized: those that the conversion stores quantized
    :param linears: every module with a matrix, in the checkpoint's order
    :param nextn_prefixes: the layers that a draft model holds under other names
    """

    quantized: Sequence[str]
    linears: Sequence[str]
    nextn_prefixes: Sequence[str]


def storage_for(config: ModelConfig) -> StoredScale:
    """The form in which the checkpoint's own config lets a per-tensor fp8 scale be found.

    :raises CheckpointError: it has no such form
    """
    quantization = config.quantization
    if quantization is None:
        return StoredScale(".weight_scale_inv", _DEFAULT_BLOCK)
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return StoredScale(".weight_scale_inv", (block[0], block[1]))
    raise CheckpointError(
        "config.json: quantization_config",
        found=f"quant_method {method!r}" + ("" if method != "fp8" else " without a usable weight_block_size"),
        wanted="no quantization_config, or fp8 with weight_block_size, to write converted tensors inline",
        remedy="use --layout sidecar, which leaves the checkpoint as it is",
    )


def edit_config(config: ModelConfig, modules: Modules) -> dict[str, Any]:
    """config.json with the quantized modules declared; key order and unknown keys are kept."""
    raw: dict[str, Any] = copy.deepcopy(dict(config.raw))
    if config.quantization is None:
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_DEFAULT_BLOCK),
            _EXCLUDE: _all_others(modules),
        }
        return raw
    holder = raw if raw.get("quantization_config") else raw["text_config"]
    quantization = holder["quantization_config"]
    excludes = read_exclude_list(config, modules.nextn_prefixes)
    for key in EXCLUDE_KEYS:
        if quantization.get(key):
            quantization[key] = _without(quantization[key], excludes, modules)
    return raw


def overridden_entries(config: ModelConfig, modules: Modules) -> Mapping[str, str]:
    """Quantized module -> the entry of the checkpoint's own exclude lists that asked to leave it alone."""
    excludes = read_exclude_list(config, modules.nextn_prefixes)
    found = {module: excludes.entry_for(module) for module in modules.quantized}
    return {module: entry.text for module, entry in found.items() if entry is not None}


def _all_others(modules: Modules) -> list[str]:
    quantized = set(modules.quantized)
    return names_to_exclude((name for name in modules.linears if name not in quantized), modules.nextn_prefixes)


def _without(entries: Iterable[str], excludes: ExcludeList, modules: Modules) -> list[str]:
    """`entries` that cover none of the quantized modules; an entry that also covers others is written out for those."""
    overridden = {entry.text for module in modules.quantized for entry in excludes.entries_for(module)}
    kept: dict[str, None] = {}
    for text in entries:
        if text not in overridden:
            kept[text] = None
            continue
        others = _all_others(modules)
        kept.update(
            dict.fromkeys(name for name in others if any(entry.text == text for entry in excludes.entries_for(name)))
        )
    return list(kept)
