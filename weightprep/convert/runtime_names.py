"""The names under which loaders look a module up in an exclude list, beside the one that the checkpoint gives it.

sglang fuses some projections into one, calls all experts of a layer one module, builds the NextN layer as
`model.decoder`, and asks for the language model of a wrapper without the wrapper's prefix: an exclude list with
checkpoint names alone makes it build those modules quantized, and the load then fails or, worse, does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from weightprep.checkpoint.exclude import FUSED, draft_names

__all__ = ["linear_modules", "names_to_exclude", "towers", "unwrapped"]

_EXPERT = re.compile(r"^(.*\.experts)\.\d+\..+$")


def linear_modules(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """The modules, of `tensors` as (name, shape), that have a matrix as their weight, in the given order."""
    return [name.removesuffix(".weight") for name, shape in tensors if name.endswith(".weight") and len(shape) >= 2]


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
            names.update(dict.fromkeys(draft_names(name, prefixes)))
    return list(names)


def unwrapped(names: Iterable[str], prefix: str) -> list[str]:
    """`names`, and those under a wrapper's `prefix` also as sglang and as transformers call them.

    language_model.model.layers.0 and model.language_model.layers.0 are model.layers.0 in sglang, and the latter in
    transformers. sglang renames plain names itself, but no regular expression.
    """
    return list(dict.fromkeys(spelled for name in names for spelled in _spellings(name, prefix)))


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    if not prefix or not name.startswith(prefix):
        return (name,)
    bare = name.removeprefix(prefix)
    if not bare.startswith("model.") and not prefix.startswith("model."):
        return (name, bare)
    inside = bare.removeprefix("model.")
    return (name, f"model.{inside}", f"model.language_model.{inside}")


def towers(names: Iterable[str], prefix: str) -> list[str]:
    """The parts of a wrapper beside the language model under `prefix` ("visual"), whose inner names loaders change."""
    if not prefix:
        return []
    beside = (name.removeprefix("model.") for name in names if not name.startswith(prefix))
    return list(dict.fromkeys(name.split(".")[0] for name in beside))


def _fused(module: str, present: set[str]) -> Iterator[str]:
    parent, _, name = module.rpartition(".")
    for fused, parts in FUSED.items():
        if name == parts[-1] and all(f"{parent}.{part}" in present for part in parts):
            yield f"{parent}.{fused}"
