"""The names under which loaders look a module up in an exclude list, beside the one that the checkpoint gives it.

sglang fuses some projections into one, calls all experts of a layer one module, and builds the NextN layer as
`model.decoder`: an exclude list with checkpoint names alone makes it build those modules quantized, and the load then
fails or, worse, does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["linear_modules", "names_of_nextn", "names_to_exclude"]

# Fused module at run time -> the checkpoint modules that it is made of.
_FUSED = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\..+$")
# Parts of a NextN layer that the draft model holds beside its decoder block.
_BESIDE_DECODER = ("eh_proj", "enorm", "hnorm", "shared_head")


def linear_modules(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """The modules, of `tensors` as (name, shape), that have a matrix as their weight, in the given order."""
    return [name.removesuffix(".weight") for name, shape in tensors if name.endswith(".weight") and len(shape) >= 2]


def names_of_nextn(module: str, nextn_prefixes: Iterable[str]) -> Iterator[str]:
    """What the draft model calls `module` if it lies under one of `nextn_prefixes` ("model.layers.78")."""
    for prefix in nextn_prefixes:
        if module.startswith(prefix + "."):
            rest = module.removeprefix(prefix + ".")
            yield f"model.{rest}" if rest.split(".")[0] in _BESIDE_DECODER else f"model.decoder.{rest}"


def names_to_exclude(modules: Iterable[str], nextn_prefixes: Iterable[str]) -> list[str]:
    """Every name that a loader may ask for when it decides about `modules`; numbered experts as their one module.

    :param modules: checkpoint names of the modules that are not quantized
    :param nextn_prefixes: the layers that the draft model holds
    """
    prefixes = tuple(nextn_prefixes)
    given = list(modules)
    present = set(given)
    names: dict[str, None] = {}
    for module in given:
        expert = _EXPERT.match(module)
        asked = [expert[1]] if expert else [module, *_fused(module, present)]
        for name in asked:
            names[name] = None
            names.update(dict.fromkeys(names_of_nextn(name, prefixes)))
    return list(names)


def _fused(module: str, present: set[str]) -> Iterator[str]:
    parent, _, name = module.rpartition(".")
    for fused, parts in _FUSED.items():
        if name == parts[-1] and all(f"{parent}.{part}" in present for part in parts):
            yield f"{parent}.{fused}"
