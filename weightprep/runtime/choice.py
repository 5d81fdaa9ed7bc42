"""The vocabulary of a call: what the output is quantized to, whether activations are, and which backend serves it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeVar

import torch

from weightprep.errors import ContractError, did_you_mean

__all__ = ["ActQuant", "Backend", "OutQuant", "Quantized", "member"]


class OutQuant(str, Enum):
    """Form in which absorb_v hands its result to o_proj."""

    NONE = "none"
    FP8_GROUP = "fp8_group"
    MXFP4 = "mxfp4"


class ActQuant(str, Enum):
    """Whether fp8 weights meet activations in bf16 (NONE) or quantized per row and 128 of K, upstream's way (GROUP).

    AUTO takes what the tuning table measured as faster among the two that are at least as accurate as upstream.
    """

    AUTO = "auto"
    NONE = "none"
    GROUP = "group"


class Backend(str, Enum):
    """Who computes. AUTO: `cuda` or `triton` by table on a GPU, `torch` elsewhere."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    CUDA = "cuda"
    AITER = "aiter"


class Quantized(NamedTuple):
    """Values and scales as sglang passes them to a quantized linear: a plain pair."""

    values: torch.Tensor
    scales: torch.Tensor


_Member = TypeVar("_Member", bound=Enum)


def member(kind: type[_Member], given: _Member | str, argument: str) -> _Member:
    """The member of `kind` that was given as itself or as its value.

    :param argument: the name under which the caller gave it
    :raises ContractError: it is neither
    """
    if isinstance(given, kind):
        return given
    for one in kind:
        if one.value == given:
            return one
    known = [str(one.value) for one in kind]
    raise ContractError(
        argument,
        found=repr(given),
        wanted=f"a {kind.__name__}, or its value: {', '.join(map(repr, known))}",
        remedy=did_you_mean(str(given), known, "pass one of these"),
    )
