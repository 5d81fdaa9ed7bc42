"""The one matcher for exclude lists: which modules a quantization config says were left alone, under whatever name it
uses.

Quantizers write these lists under five keys, as exact names, globs or regular expressions, for one expert or for all,
with and without the prefix of a wrapper, and for a NextN layer under the checkpoint's name or the draft model's.
Loaders differ in what a plain name reaches. A list that is read too narrowly lets a conversion override it without a
word, so every form is known here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from weightprep.checkpoint.config import CONFIG_NAME, HF_QUANT_CONFIG_NAME, ModelConfig
from weightprep.errors import CheckpointError
from weightprep.formats.encoding import SCALE_SUFFIXES, WEIGHT_SUFFIXES

__all__ = [
    "EXCLUDE_KEYS",
    "FUSED",
    "ExcludeEntry",
    "ExcludeList",
    "draft_names",
    "pattern_of",
    "read_exclude_list",
]

EXCLUDE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")

# Module at run time -> the modules of the checkpoint that it is fused from.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
)
# What may stand before `layers.N`, longest first; lists drop or add it freely.
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
# Parts of a NextN layer that the draft model holds beside its decoder block.
_BESIDE_DECODER = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..+")
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|\{\d*,\}")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)(?:[*+]|\{)")
_MAX_UNBOUNDED = 6


class _Reach(Enum):
    """Which modules a plain name stands for."""

    ITSELF = "exactly that module"
    SUFFIX = "modules whose path ends in it"
    ANYWHERE = "modules whose path contains it, so also everything below"
    PART = "modules of which it is one part, or all of the path"


# By quant_method, as sglang 0.5.23 reads them; other methods get the widest reading.
_REACH: Mapping[str, _Reach] = MappingProxyType(
    {
        "quark": _Reach.ITSELF,
        "compressed-tensors": _Reach.SUFFIX,
        "fp8": _Reach.ANYWHERE,
        "modelopt": _Reach.PART,
        "modelopt_fp8": _Reach.PART,
        "modelopt_fp4": _Reach.PART,
        "modelopt_mixed": _Reach.PART,
    }
)


@dataclass(frozen=True, slots=True)
class ExcludeEntry:
    """One entry of one list.

    :param file: the file in which it stands
    :param key: the key of its list
    """

    text: str
    file: str
    key: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Pattern:
    regex: re.Pattern[str]
    by_part: bool

    def matches(self, names: Iterable[str]) -> bool:
        """Whether it matches one of `names`, or with `by_part` one part of one of them."""
        for name in names:
            if self.regex.match(name) or (self.by_part and any(self.regex.match(part) for part in name.split("."))):
                return True
        return False


@dataclass(frozen=True, slots=True)
class ExcludeList:
    """All exclude lists of a checkpoint together.

    :param entries: in the order of the files
    :param nextn_prefixes: the layers that a draft model holds ("model.layers.78")
    """

    entries: tuple[ExcludeEntry, ...]
    nextn_prefixes: tuple[str, ...]
    _reach: _Reach
    _patterns: Mapping[ExcludeEntry, _Pattern]

    def entry_for(self, module: str) -> ExcludeEntry | None:
        """The first entry that excludes `module`, a checkpoint's or a runtime's name; None where none does."""
        return next(self.entries_for(module), None)

    def entries_for(self, module: str) -> Iterator[ExcludeEntry]:
        """Every entry that excludes `module`."""
        names = self._names(module)
        keys = {key for name in names for key in self._keys(name)}
        # One excluded expert excludes the module: it is built quantized or not as a whole.
        experts = tuple(name + "." for name in names if name.endswith(".experts"))
        spelled = _spelled(names)
        for entry in self.entries:
            pattern = self._patterns.get(entry)
            if pattern is not None:
                if pattern.matches(spelled):
                    yield entry
            elif (bare := _bare(entry.text)) in keys or bare.startswith(experts):
                yield entry

    def unmatched(self, tensors: Iterable[str]) -> tuple[ExcludeEntry, ...]:
        """Entries that name nothing in the checkpoint, given the names of all its tensors."""
        names = {name for module in {_module_of(tensor) for tensor in tensors} for name in self._names(module)}
        keys = {key for name in names for key in self._keys(name)}
        spelled = _spelled(sorted(names))
        return tuple(
            entry
            for entry in self.entries
            if not (self._patterns[entry].matches(spelled) if entry in self._patterns else _bare(entry.text) in keys)
        )

    def _names(self, module: str) -> list[str]:
        """Every name that a list may use for `module`, without the prefixes of wrappers."""
        names = {_bare(name): None for name in (module, *draft_names(module, self.nextn_prefixes))}
        for name in tuple(names):
            expert = _EXPERT.fullmatch(name)
            if expert:
                names[expert[1]] = None
            parent, dot, last = name.rpartition(".")
            for fused, parts in FUSED.items():
                if last in parts:
                    names[parent + dot + fused] = None
                elif last == fused:
                    names.update(dict.fromkeys(parent + dot + part for part in parts))
        return list(names)

    def _keys(self, name: str) -> Iterator[str]:
        """The plain entries, without prefix, that reach `name`."""
        yield name
        parts = name.split(".")
        count = len(parts)
        if self._reach is _Reach.PART:
            yield from parts
        elif self._reach is _Reach.SUFFIX:
            yield from (".".join(parts[start:]) for start in range(1, count))
        elif self._reach is _Reach.ANYWHERE:
            for start in range(count):
                yield from (".".join(parts[start:stop]) for stop in range(start + 1, count + 1))


def read_exclude_list(config: ModelConfig, nextn_prefixes: Iterable[str] = ()) -> ExcludeList:
    """Collect the exclude lists of a checkpoint's quantization_config and hf_quant_config.json.

    :param nextn_prefixes: the layers that a draft model holds ("model.layers.78")
    :raises CheckpointError: a list is not a list of strings, or has a pattern that cannot be evaluated safely
    """
    method = str((config.quantization or {}).get("quant_method", ""))
    nested = (config.hf_quant_config or {}).get("quantization")
    sources = (
        (CONFIG_NAME, config.quantization or {}),
        (HF_QUANT_CONFIG_NAME, nested if isinstance(nested, dict) else config.hf_quant_config or {}),
    )
    entries = tuple(entry for file, holder in sources for entry in _entries(file, holder))
    if not method and config.hf_quant_config is not None:
        method = "modelopt"
    reach = _REACH.get(method, _Reach.ANYWHERE)
    patterns = {}
    for entry in entries:
        regex = pattern_of(entry)
        if regex is not None:
            patterns[entry] = _Pattern(regex, by_part=reach is _Reach.PART)
    return ExcludeList(entries, tuple(nextn_prefixes), reach, MappingProxyType(patterns))


def draft_names(module: str, nextn_prefixes: Iterable[str]) -> Iterator[str]:
    """What the draft model calls `module` if it lies under one of `nextn_prefixes`."""
    for prefix in nextn_prefixes:
        if module.startswith(prefix + "."):
            rest = module.removeprefix(prefix + ".")
            yield f"model.{rest}" if rest.split(".")[0] in _BESIDE_DECODER else f"model.decoder.{rest}"


def _entries(file: str, holder: Mapping[str, object]) -> Iterator[ExcludeEntry]:
    for key in EXCLUDE_KEYS:
        value = holder.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise CheckpointError(
                f"{file}: {key}",
                found=f"a JSON {type(value).__name__}",
                wanted="a list of strings",
                remedy="take the file from the model's repository again, or repair it by hand",
            )
        yield from (ExcludeEntry(text, file, key) for text in value)


def pattern_of(entry: ExcludeEntry) -> re.Pattern[str] | None:
    """The pattern of a glob or `re:` entry, None for a plain name.

    :raises CheckpointError: it is no regular expression, or one that can take for ever
    """
    if not entry.text.startswith("re:"):
        # fnmatch compiles any number of stars into a pattern that cannot backtrack far.
        return re.compile(fnmatch.translate(entry.text)) if any(c in entry.text for c in "*?[") else None
    text = entry.text.removeprefix("re:")
    if _REPEATED_GROUP.search(text) or len(_UNBOUNDED.findall(text)) > _MAX_UNBOUNDED:
        raise CheckpointError(
            f"{entry.file}: {entry.key}",
            found=f"the regular expression {text[:200]!r}",
            wanted=f"at most {_MAX_UNBOUNDED} of '*' and '+', and no repeated group: others can take for ever",
            remedy="write the entry out as module names",
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{entry.file}: {entry.key}",
            found=f"{text[:200]!r} ({error})",
            wanted="a regular expression",
            remedy="correct the entry, or write it out as module names",
        ) from None


def _bare(name: str) -> str:
    """`name` without the prefix of a wrapper or of the model itself."""
    return name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))


def _spelled(names: Iterable[str]) -> list[str]:
    """`names` with every prefix that a pattern may expect."""
    return [prefix + name for name in names for prefix in _PREFIXES]


def _module_of(tensor: str) -> str:
    for suffix in (*WEIGHT_SUFFIXES, *SCALE_SUFFIXES):
        if tensor.endswith(suffix):
            return tensor.removesuffix(suffix)
    return tensor
