"""How each release of sglang brings activation scales to gfx95's fp8 GEMM, which reads them column-major, as data.

The call sites are the activation quantizations of models with fp8 weights in blocks of 128: before projections, behind
norms, and for o_proj. Read from the sources of sglang 0.5.12, 0.5.15, 0.5.18, 0.5.20, 0.5.22 and 0.5.23.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from weightprep.contracts.gates import Prediction, engine_version_of

__all__ = ["predict_scales"]

_VIEWED = Prediction("scales_column_major", True, "quantizations write the scales where the GEMM reads them")
# First match wins: releases, what sglang does, and whether weightprep hooks the call sites.
_GATES = (
    ("<0.5.15", "each linear layer transposes its scale in a kernel of its own", False),
    ("<0.5.20", "every call site but DeepSeek-V4's norm transposes its scale in a kernel of its own", True),
    ("<0.5.22", "the norms before and in attention transpose their scale in a kernel of their own", True),
)


def predict_scales(target: str, engine_version: str) -> tuple[Prediction, Prediction] | None:
    """What sglang does with group scales today and with weightprep; None where no GEMM reads them column-major.

    :param target: hardware target; column-major is read on gfx950 alone, with aiter and ROCm 7.2 or later
    :raises EngineError: a version that has no plugin interface
    """
    version = engine_version_of(engine_version)
    if target != "gfx950":
        return None
    for versions, reason, hooked in _GATES:
        if SpecifierSet(versions, prereleases=True).contains(version):
            today = Prediction("scales_transposed", False, reason)
            return today, _VIEWED if hooked else today
    return _VIEWED, _VIEWED
