"""The keys of `--model-loader-extra-config` that are ours, checked, and apart from those of the wrapped load format.

sglang's loaders refuse keys that they do not know, and a misspelt key of ours would reach them or, worse, be dropped:
so a key that looks like one of ours is an error with a suggestion, and every other key goes on to the inner loader.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from weightprep.contracts import name_targets
from weightprep.errors import EngineError, WeightprepError, likely_name

__all__ = [
    "TARGET_VARIABLE",
    "Options",
    "explaining_draft",
    "explaining_flags",
    "explaining_inner_keys",
    "split_options",
]

TARGET_VARIABLE = "WEIGHTPREP_TARGET"
# Keys of sglang's own loaders, so that none of them is taken for a misspelt key of ours.
_INNER_KEYS = frozenset(
    {"enable_multithread_load", "num_threads", "enable_gds", "pattern", "concurrency", "memory_limit", "distributed"}
)
# the command line's options that a server has as keys, and the file that a remedy gives one
_FLAG = re.compile(r"--(recipe|precision|nextn)\b(?: ([\w.]+\.yaml))?")


class Options(BaseModel):
    """What a server was asked to do.

    :param recipe: name or file of a recipe; None finds it by the model's architecture
    :param precision: of the absorbed weights: one for all, or by layer group; None takes the recipe's default
    :param target: the hardware whose gates are meant; auto asks torch
    :param inner: the load format that reads the weights
    :param on_violation: what a broken contract does to the server
    :param scale_scope: one scale for the whole tensor, or one for each tensor parallel rank as upstream has it
    :param sidecar: auto takes the model directory's own, off none, anything else is the directory to take it from
    :param canary: run each kernel path once against the float32 reference at startup
    :param runtime: whose absorbed matmuls run
    :param nextn: what to do with the NextN layer
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str | None = None
    precision: str | dict[str, str] | None = None
    target: Literal["auto", "gfx950", "gfx942", "sm90", "sm100", "cpu"] = "auto"
    inner: str = "auto"
    on_violation: Literal["error", "warn"] = "error"
    scale_scope: Literal["tensor", "rank"] = "tensor"
    sidecar: str = "auto"
    canary: Literal["on", "off"] = "on"
    runtime: Literal["auto", "aiter", "triton", "torch", "upstream"] = "auto"
    nextn: Literal["convert", "keep"] = "convert"

    @field_validator("canary", mode="before")
    @classmethod
    def _boolean(cls, value: object) -> object:
        # YAML and JSON writers turn on and off into booleans
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("sidecar", mode="before")
    @classmethod
    def _sidecar_boolean(cls, value: object) -> object:
        return {True: "auto", False: "off"}[value] if isinstance(value, bool) else value


_OUR_KEYS = f"weightprep's keys are {', '.join(sorted(Options.model_fields))}"


def split_options(extra: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Our options, and the keys that are left for the inner loader.

    :raises EngineError: a key that looks like a misspelt one of ours, or a value that is not allowed
    """
    ours = {key: value for key, value in extra.items() if key in Options.model_fields}
    rest = {key: value for key, value in extra.items() if key not in ours}
    for key in rest.keys() - _INNER_KEYS:
        likely = likely_name(key, Options.model_fields)
        if likely:
            raise EngineError(
                f"--model-loader-extra-config: {key}",
                found="an unknown key",
                wanted=f"{likely!r}, perhaps",
                remedy=_OUR_KEYS,
            )
    variable = os.environ.get(TARGET_VARIABLE)
    if variable and "target" not in ours:
        ours["target"] = variable
    try:
        return Options.model_validate(ours), rest
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        where = TARGET_VARIABLE if key == "target" and "target" not in extra else f"--model-loader-extra-config: {key}"
        remedy = f"name the architecture: {name_targets()}" if key == "target" else "correct the value"
        raise EngineError(where, found=repr(first["input"]), wanted=first["msg"], remedy=remedy) from None


@contextmanager
def explaining_inner_keys(rest: Mapping[str, Any], inner: str) -> Iterator[None]:
    """While the loader of load format `inner` is built with the keys `rest`.

    :raises EngineError: it refuses them
    """
    try:
        yield
    except ValueError as error:
        if not rest:
            raise
        raise EngineError(
            f"--model-loader-extra-config: {', '.join(sorted(rest))}",
            found=f"no key of weightprep, and the inner loader's answer: {error}",
            wanted=f"keys of weightprep, or of sglang's loader for {inner!r}, which gets all others",
            remedy=_OUR_KEYS,
        ) from error


@contextmanager
def explaining_flags() -> Iterator[None]:
    """While a model is planned, whose errors name options of the command line: a server has them as keys.

    :raises WeightprepError: the same, with the keys in its remedy
    """
    try:
        yield
    except WeightprepError as error:
        remedy = _FLAG.sub(_as_key, error.remedy)
        raise type(error)(error.subject, found=error.found, wanted=error.wanted, remedy=remedy) from None


@contextmanager
def explaining_draft(is_draft: bool) -> Iterator[None]:
    """While a model is planned that may be the draft of another, and is then in our format for that one's sake.

    :raises WeightprepError: the same, with the way out of it in its remedy
    """
    try:
        yield
    except WeightprepError as error:
        if not is_draft:
            raise
        remedy = (
            "a draft without a format of its own is loaded in that of its target: leave this one to sglang with "
            f"--speculative-draft-load-format auto; or {error.remedy}"
        )
        raise type(error)(f"draft: {error.subject}", found=error.found, wanted=error.wanted, remedy=remedy) from None


def _as_key(flag: re.Match[str]) -> str:
    return f"--model-loader-extra-config '{json.dumps({flag[1]: flag[2] or '...'})}'"
