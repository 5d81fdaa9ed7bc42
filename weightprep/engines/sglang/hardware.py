"""Which target's gates apply on this machine, in the names that recipes and gates use, and whether aiter is on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from weightprep.errors import EngineError

__all__ = [
    "AITER_REMEDY",
    "AITER_VARIABLE",
    "UNKNOWN_GPU_REMEDY",
    "aiter_is_on",
    "describe_gpu",
    "detect_target",
    "resolve_target",
]

AITER_VARIABLE = "SGLANG_USE_AITER"
AITER_REMEDY = f"export {AITER_VARIABLE}=1 before the server starts: sglang reads it once, at import"
UNKNOWN_GPU_REMEDY = "serve without --load-format weightprep, or name the gates that apply in WEIGHTPREP_TARGET"
_GFX = ("gfx950", "gfx942")
_SM = {9: "sm90", 10: "sm100"}


def resolve_target(asked: str) -> str:
    """`asked`, or for "auto" the target of the current device.

    :raises EngineError: a GPU that no gate is known for
    """
    if asked != "auto":
        return asked
    found = detect_target()
    if found is None:
        raise EngineError(
            "target",
            found=describe_gpu(),
            wanted=f"one of {', '.join((*_GFX, *_SM.values()))}",
            remedy=UNKNOWN_GPU_REMEDY,
        )
    return found


def detect_target() -> str | None:
    """The target of the current device: "cpu" without a GPU, None for a GPU that no gate is known for."""
    if not torch.cuda.is_available():
        return "cpu"
    if torch.version.hip is not None:
        return next((name for name in _GFX if describe_gpu().startswith(name)), None)
    return _SM.get(torch.cuda.get_device_capability()[0])


def aiter_is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether sglang takes aiter's kernels: what SGLANG_USE_AITER says on ROCm.

    True on other machines: there a ROCm target is named to see what its gates choose, aiter's kernels included.
    """
    # the spellings that sglang's get_bool_env_var takes for true
    return torch.version.hip is None or environment.get(AITER_VARIABLE, "").lower() in ("1", "true")


def describe_gpu() -> str:
    """The architecture of the current GPU, as its vendor names it."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName)
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
