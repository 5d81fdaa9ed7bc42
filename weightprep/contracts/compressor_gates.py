"""What becomes of the gate score of DeepSeek-V4's compressor in each release of sglang, as data.

On ROCm with aiter the gate GEMM writes bf16, and releases from 0.5.15 on widen it in a kernel of its own before the
compress kernel reads it; on CUDA the GEMM writes float32 itself. Read from the sources of sglang's releases in
READ_RELEASES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightprep.contracts.engine_version import engine_version_of, is_release_in
from weightprep.contracts.gates import TARGETS, Prediction, check_target

__all__ = ["COMPRESSOR_GATES", "CompressorGate", "predict_compressor"]

_ROCM = ("gfx950", "gfx942")
_MODULE = "sglang.srt.layers.attention.dsv4.compressor"
# What weightprep's compress kernel is given without a cast; dtypes as the checkpoint stores the tensors.
_WANTED = {"wkv": "bfloat16", "wgate": "bfloat16", "ape": "float32"}


@dataclass(frozen=True, slots=True)
class CompressorGate:
    """How one range of releases serves the score on some targets.

    :param widens: whether a kernel of its own turns the bf16 score into float32
    :param hooks: dotted names of the producer and the consumer that weightprep hooks; empty where none is
    """

    targets: tuple[str, ...]
    versions: str
    widens: bool
    hooks: tuple[str, ...]


# First match wins.
COMPRESSOR_GATES = (
    CompressorGate(_ROCM, "<0.5.15", False, ()),
    CompressorGate(
        _ROCM,
        "<0.5.18",
        True,
        (f"{_MODULE}.linear_bf16_fp32", "sglang.jit_kernel.dsv4.compress.compress_forward"),
    ),
    CompressorGate(
        _ROCM,
        "<0.5.20",
        True,
        (f"{_MODULE}.linear_bf16_fp32", "sglang.kernels.ops.attention.dsv4.compress.compress_forward"),
    ),
    CompressorGate(
        _ROCM,
        "",
        True,
        (
            f"{_MODULE}.Compressor._compute_wkv_gate",
            "sglang.kernels.ops.attention.dsv4.compress.compress_forward",
        ),
    ),
    CompressorGate(TARGETS, "", False, ()),
)


def predict_compressor(
    target: str, engine_version: str, dtypes: Mapping[str, str]
) -> tuple[Prediction, Prediction, tuple[str, ...]]:
    """What sglang does with a compressor today, what with weightprep, and what weightprep hooks for it.

    :param target: one of TARGETS
    :param engine_version: version of sglang, for example "0.5.23"
    :param dtypes: of the checkpoint's `wkv`, `wgate` and `ape`: names of torch dtypes without "torch."
    :raises EngineError: an unknown target, or a version that has no plugin interface
    """
    check_target(target)
    version = engine_version_of(engine_version)
    gate = next(gate for gate in COMPRESSOR_GATES if target in gate.targets and is_release_in(gate.versions, version))
    if not gate.widens:
        reason = "the gate GEMM writes float32 itself: no pass to save"
        stays = Prediction("compressor_float32", True, reason)
        return stays, stays, ()
    today = Prediction("compressor_widened", False, "each bf16 score is widened to float32 in a kernel of its own")
    wrong = [f"{name} is {found}" for name, found in dtypes.items() if found != _WANTED[name]]
    if wrong:
        reason = f"{', '.join(wrong)}: the direct path reads wkv and wgate in bfloat16 and ape in float32"
        return today, Prediction("compressor_widened", False, reason), ()
    return today, Prediction("compressor_direct", True, "the compress kernel reads the bf16 score"), gate.hooks
