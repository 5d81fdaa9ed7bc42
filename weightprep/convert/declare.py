"""Tells a quantization_config of modules that have become fp8 under one scale, where being on no exclude list does not
say it: Quark and compressed-tensors name each scheme's modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from weightprep.errors import CheckpointError

__all__ = ["declare"]

_GROUP = "weightprep"
_SHOWN_CHARACTERS = 60
_LAYER = re.compile(r"(.*?\.layers\.)(\d+)(\..*)")


def declare(quantization: dict[str, Any], names: Sequence[str]) -> None:
    """Add the scheme of the modules `names` to a checkpoint's `quantization`, of whatever quant_method.

    :raises CheckpointError: what it has of schemes is malformed
    """
    add = _BY_METHOD.get(quantization.get("quant_method"))
    if add is not None:
        add(quantization, names)


def _mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object at `key`, empty where there is none.

    :raises CheckpointError: something else is there
    """
    value = of.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"quantization_config: {key}",
            found=repr(value)[:_SHOWN_CHARACTERS],
            wanted="an object",
            remedy="the config is damaged: download it again, or use --layout sidecar, which leaves it alone",
        )
    return value


def _to_quark(quantization: dict[str, Any], names: Sequence[str]) -> None:
    """First in layer_quant_config, because the first pattern that matches decides."""
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "group_size": None, "symmetric": True}
    scheme = {
        "weight": {**tensor, "is_dynamic": False},
        "input_tensors": {**tensor, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
    }
    ours = dict.fromkeys(names, scheme)
    theirs = _mapping(quantization, "layer_quant_config")
    quantization["layer_quant_config"] = {**ours, **{name: spec for name, spec in theirs.items() if name not in ours}}


def _to_compressed_tensors(quantization: dict[str, Any], names: Sequence[str]) -> None:
    """One more group, the first, because sglang takes the first target that fits a module. Its targets are regular
    expressions, because transformers takes the first group with another kind of target for that of the experts. Where
    formats differ each group names its own; the one at the top stays, because sglang builds packed experts by it alone.
    """
    numbers = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "group_size": None}
    ours = "float-quantized"
    groups = _mapping(quantization, "config_groups")
    top = quantization.get("format")
    if top not in (ours, "mixed-precision"):
        for name in groups:
            _mapping(groups, name).setdefault("format", top)
    group = {
        "targets": _patterns(names),
        "weights": {**numbers, "dynamic": False},
        "input_activations": {**numbers, "dynamic": True},
        "output_activations": None,
        "format": ours,
    }
    # an earlier conversion's group, of other modules, stays
    name = next(name for name in (_GROUP, *(f"{_GROUP}_{n}" for n in range(2, len(groups) + 3))) if name not in groups)
    quantization["config_groups"] = {name: group, **groups}


def _patterns(names: Iterable[str]) -> list[str]:
    """Regular expressions for exactly `names`, those that differ in their layer alone in one: loaders try every target
    on every module.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = _LAYER.fullmatch(name)
        head, layer, tail = found.groups() if found else (name, "", "")
        layers.setdefault((head, tail), []).append(layer)
    return [
        f"re:{re.escape(head)}({'|'.join(numbers)}){re.escape(tail)}$" if tail else f"re:{re.escape(head)}$"
        for (head, tail), numbers in layers.items()
    ]


_BY_METHOD: Mapping[object, Callable[[dict[str, Any], Sequence[str]], None]] = MappingProxyType(
    {"quark": _to_quark, "compressed-tensors": _to_compressed_tensors}
)
