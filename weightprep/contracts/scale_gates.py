"""How each release of sglang brings activation scales to gfx95's fp8 GEMM, which reads them column-major, as data.

The call sites are the activation quantizations of models with fp8 weights in blocks of 128: before projections, behind
norms, and for o_proj. Read from the sources of sglang's releases in READ_RELEASES.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightprep.contracts.engine_version import engine_version_of, is_release_in
from weightprep.contracts.gates import Prediction, check_target

__all__ = ["predict_scales"]


@dataclass(frozen=True, slots=True)
class _ScaleGate:
    """What one range of releases does.

    :param hooked: whether weightprep hooks the call sites
    """

    versions: str
    reason: str
    hooked: bool


_VIEWED = Prediction("scales_column_major", True, "quantizations write the scales where the GEMM reads them")
# First match wins; later releases write the scales column-major themselves.
_SCALE_GATES = (
    _ScaleGate("<0.5.15", "each linear layer transposes its scale in a kernel of its own", False),
    _ScaleGate("<0.5.20", "every call site but DeepSeek-V4's norm transposes its scale in a kernel of its own", True),
    _ScaleGate("<0.5.22", "the norms before and in attention transpose their scale in a kernel of their own", True),
)


def predict_scales(target: str, engine_version: str) -> tuple[Prediction, Prediction] | None:
    """What sglang does with group scales today and with weightprep; None where no GEMM reads them column-major.

    :param target: one of TARGETS; column-major is read on gfx950 alone, with aiter and ROCm 7.2 or later
    :raises EngineError: an unknown target, or a version that has no plugin interface
    """
    check_target(target)
    version = engine_version_of(engine_version)
    if target != "gfx950":
        return None
    for gate in _SCALE_GATES:
        if is_release_in(gate.versions, version):
            today = Prediction("scales_transposed", False, gate.reason)
            return today, _VIEWED if gate.hooked else today
    return _VIEWED, _VIEWED
