"""Which kernel path an absorbed matmul takes, as sglang decides it: the conditions as data, in the order of evaluation.

Read from forward_mla.py and forward_mla_rocm.py of sglang's releases in READ_RELEASES. The conditions
compare dtypes, so whether a layer is fast can be told before anything is loaded. The two matmuls have gates of their
own, and on ROCm the second one looks at the weight of the first; `predict` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from weightprep.contracts.engine_version import engine_version_of, is_release_in
from weightprep.errors import EngineError

__all__ = [
    "GATES",
    "TARGETS",
    "TARGET_NAMES",
    "Gate",
    "Prediction",
    "check_target",
    "name_targets",
    "predict",
]

# target -> the hardware that it is, where it has a name
TARGET_NAMES: Mapping[str, str] = {
    "gfx950": "MI350X, MI355X",
    "gfx942": "MI300X",
    "sm90": "H100, H200",
    "sm100": "B200",
    "cpu": "",
}
TARGETS = tuple(TARGET_NAMES)

_ROCM = ("gfx950", "gfx942")
_CUDA = ("sm90", "sm100")
_FN, _FNUZ, _FP4 = "float8_e4m3fn", "float8_e4m3fnuz", "uint8"


@dataclass(frozen=True, slots=True)
class Gate:
    """One branch of one of the two matmuls.

    :param matmul: "q" (q_nope x w_kc) or "v" (attention output x w_vc)
    :param needs: attribute of the attention module -> what the branch's condition compares it with; w_kc and w_vc are
        dtypes, w_scale is "tensor" or "float". "aiter" is the process's, "on" or "off". All must hold.
    :param reads: what the kernel then takes the attributes for, where the condition does not test them; anything else
        is computed wrong or fails
    :param fast: whether the matmul runs in the weights' precision without a pass over the weights before it
    """

    matmul: str
    targets: tuple[str, ...]
    versions: str
    path: str
    kernel: str
    fast: bool
    needs: Mapping[str, str]
    reads: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The path of a layer: of both matmuls where they agree.

    :param fast: whether both matmuls run in the weights' precision without a pass over the weights before them
    :param reason: what decided it
    :param sound: False if the kernels would misread a tensor: numbers are then wrong, or the call fails
    """

    path: str
    fast: bool
    reason: str
    sound: bool = True


_AITER_FP8 = "aiter batched_gemm_a8w8 (per-token-group activations, per-tensor weights)"
_AITER_FP4 = "aiter batched_gemm_afp4wfp4_pre_quant"
_SCALED = "torch.bmm after w.to(bfloat16) * w_scale in each call"
# SGLANG_USE_AITER: off, gfx950 takes none of its kernels.
_AITER = {"aiter": "on"}

# First match wins, within a matmul.
GATES = (
    Gate("q", ("gfx950",), "", "mxfp4_absorbed", _AITER_FP4, True, {"w_kc": _FP4} | _AITER, {"w_scale_k": _FP4}),
    Gate("q", ("gfx950",), "", "fp8_absorbed", _AITER_FP8, True, {"w_kc": _FN} | _AITER, {"w_scale": "tensor"}),
    # in graph capture only: in eager mode sglang prefers torch.bmm there
    Gate("q", _ROCM, "", "fp8_absorbed", _AITER_FP8, True, {"w_kc": _FNUZ}, {"w_scale": "tensor"}),
    Gate("v", ("gfx950",), "", "mxfp4_absorbed", _AITER_FP4, True, {"w_vc": _FP4} | _AITER, {"w_scale_v": _FP4}),
    # the condition is on w_kc; w_vc is not looked at
    Gate(
        "v",
        ("gfx950",),
        "",
        "fp8_absorbed",
        _AITER_FP8,
        True,
        {"w_kc": _FN} | _AITER,
        {"w_vc": _FN, "w_scale": "tensor"},
    ),
    Gate("q", _CUDA, "", "fp8_absorbed", "flashinfer bmm_fp8", True, {"w_kc": _FN}, {"w_scale": "tensor"}),
    Gate("v", _CUDA, "", "fp8_absorbed", "flashinfer bmm_fp8", True, {"w_vc": _FN}, {"w_scale": "tensor"}),
    Gate("q", ("cpu",), "", "fp8_dequantized", _SCALED, False, {"w_kc": _FN}, {"w_scale": "tensor"}),
    Gate("v", ("cpu",), "", "fp8_dequantized", _SCALED, False, {"w_vc": _FN}, {"w_scale": "tensor"}),
    # On ROCm w_scale multiplies a bf16 weight too: before 0.5.20 in each call, since then unless it is the float 1.0.
    Gate("q", _ROCM, "<0.5.20", "bf16_scaled", _SCALED, False, {"w_kc": "bfloat16"}, {"w_scale": "float"}),
    Gate("v", _ROCM, "<0.5.20", "bf16_scaled", _SCALED, False, {"w_vc": "bfloat16"}, {"w_scale": "float"}),
    Gate("q", _ROCM, "", "bf16", "torch.bmm", False, {"w_kc": "bfloat16"}, {"w_scale": "float"}),
    Gate("v", _ROCM, "", "bf16", "torch.bmm", False, {"w_vc": "bfloat16"}, {"w_scale": "float"}),
    Gate("q", (*_CUDA, "cpu"), "", "bf16", "torch.bmm", False, {"w_kc": "bfloat16"}, {}),
    Gate("v", (*_CUDA, "cpu"), "", "bf16", "torch.bmm", False, {"w_vc": "bfloat16"}, {}),
    Gate("q", _ROCM, "", "fp8_dequantized", _SCALED, False, {}, {"w_kc": "float", "w_scale": "tensor"}),
    Gate("v", _ROCM, "", "fp8_dequantized", _SCALED, False, {}, {"w_vc": "float", "w_scale": "tensor"}),
    Gate("q", TARGETS, "", "unsupported", "torch.bmm", False, {}, {"w_kc": "bfloat16"}),
    Gate("v", TARGETS, "", "unsupported", "torch.bmm", False, {}, {"w_vc": "bfloat16"}),
)
_FLOATING = frozenset({"bfloat16", "float16", "float32", _FN, _FNUZ})


def check_target(target: str) -> None:
    """Refuse what is not one of TARGETS.

    :raises EngineError: an unknown target
    """
    if target not in TARGETS:
        raise EngineError(
            f"target {target}",
            found="unknown",
            wanted=f"one of {', '.join(TARGETS)}",
            remedy=f"name the architecture: {name_targets()}",
        )


def predict(target: str, engine_version: str, attributes: Mapping[str, str]) -> Prediction:
    """The path that sglang takes for a layer with these attributes.

    :param target: one of TARGETS
    :param engine_version: version of sglang, for example "0.5.23"
    :param attributes: "w_kc" and "w_vc": names of torch dtypes without "torch."; "w_scale": "tensor" or "float";
        "w_scale_k" and "w_scale_v": dtype names, where the layer has them; "aiter": "on", the default, or "off",
        which says whether SGLANG_USE_AITER is set
    :raises EngineError: an unknown target, or a version that has no plugin interface
    """
    check_target(target)
    version = engine_version_of(engine_version)
    attributes = _AITER | dict(attributes)
    q, v = (_select(matmul, target, version, attributes) for matmul in ("q", "v"))
    for gate in (q, v):
        for attribute, wanted in gate.reads.items():
            found = attributes.get(attribute, "absent")
            if found != wanted and not (wanted == "float" and found in _FLOATING):
                reason = f"{gate.kernel} takes {attribute} for {wanted}, but it is {found}: the result is wrong"
                return Prediction(gate.path, False, reason, sound=False)
    if q.path == v.path:
        return Prediction(q.path, q.fast and v.fast, f"w_kc is {attributes['w_kc']}: {q.kernel}")
    return Prediction(f"{q.path}+{v.path}", q.fast and v.fast, f"q: {q.kernel}; v: {v.kernel}")


def _select(matmul: str, target: str, version: Version, attributes: Mapping[str, str]) -> Gate:
    return next(
        gate
        for gate in GATES
        if gate.matmul == matmul
        and target in gate.targets
        and is_release_in(gate.versions, version)
        and all(attributes.get(attribute) == wanted for attribute, wanted in gate.needs.items())
    )


def name_targets() -> str:
    """Each target with the hardware that it is, for help and messages."""
    return ", ".join(f"{target} ({hardware})" if hardware else target for target, hardware in TARGET_NAMES.items())
