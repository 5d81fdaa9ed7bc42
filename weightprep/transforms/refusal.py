"""pydantic's errors about a value of a recipe in plain words: what is there, what may be, and the likely slip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from weightprep.errors import did_you_mean

__all__ = ["Refusal", "refusal"]

_MAX_SHOWN = 80
_KINDS = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The parts of an error of weightprep's own."""

    found: str
    wanted: str
    remedy: str


def refusal(error: ErrorDetails, remedy: str) -> Refusal:
    """What `error` says.

    :param remedy: the next step, behind the likely name where there is one
    """
    kind, value = error["type"], error["input"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "missing":
        return Refusal("no such key", "the key, which has no default", f"add it; {remedy}")
    if kind in ("literal_error", "enum"):
        known = re.findall(r"'([^']+)'", context["expected"])
        meant = did_you_mean(value, known, remedy) if isinstance(value, str) else remedy
        return Refusal(_shorten(value), context["expected"], meant)
    if kind == "too_short":
        return Refusal(_shorten(value), f"{context['min_length']} or more entries", remedy)
    if kind == "string_pattern_mismatch":
        return Refusal(_shorten(value), f"a text that fits {context['pattern']}", remedy)
    return Refusal(_shorten(value), _KINDS.get(kind, error["msg"]), remedy)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
