"""Puts DeepSeek-V4's compressor on the path without a widening pass, in an sglang that serves it with aiter on ROCm.

There the gate GEMM writes bf16 and every release from 0.5.15 on widens it to float32 in a kernel of its own before the
compress kernel reads it. Two hooks remove that kernel: the producer's result stays as it is, and the consumer takes
it. The consumer is weightprep's, because upstream's wants the positional bias in the dtype of the scores: it rounds
that parameter to bf16, in one more kernel per call, and makes its output bf16. Here both stay float32, so the numbers
are those of the widened path.

    release              producer                                  consumer
    0.5.12               writes float32 itself: left alone
    0.5.15, 0.5.18       compressor.linear_bf16_fp32               compress_forward
    0.5.20 and later     Compressor._compute_wkv_gate              compress_forward

In 0.5.15 and 0.5.18 the name is rebound in the compressor's module alone. A hook on the function itself would reach
the router's GEMM, and one on compute_kv_score would miss the second producer of 0.5.18, which starts a gather ahead of
time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weightprep.engines.sglang.compressor_targets import compressor_targets
from weightprep.engines.sglang.guard import ensure_hook
from weightprep.engines.sglang.versions import COMPRESSOR, GATE, installed_root, installed_version
from weightprep.errors import EngineError
from weightprep.runtime import witness
from weightprep.runtime.compress import compress_decode, compress_prefill

__all__ = [
    "CompressorPath",
    "Gemm",
    "register_compressor_hooks",
]

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

GATE_PATH = "compressor_gate/bf16"
COMPRESS_PATH = "compress/float32_arithmetic"


@dataclass(frozen=True, slots=True)
class CompressorPath:
    """What became of the compressor at startup.

    :param direct: the score reaches the compress kernel as the GEMM wrote it
    :param reason: why, in words for the startup table
    """

    direct: bool
    reason: str


# The GEMM that the producer's hooks call; upstream's methods have no argument for it.
_gemm: Gemm | None = None


def register_compressor_hooks(gemm: Gemm | None = None) -> CompressorPath:
    """Hook the compressor of the running sglang, or say why it stays as it is. Calling it again changes nothing.

    :param gemm: (tokens, hidden) x (rows, hidden) in bf16 -> (tokens, rows) in bf16; default aiter's tuned GEMM, and
        without aiter on ROCm nothing is hooked
    :raises EngineError: online compress is on, whose kernels read float32 only; or a hook did not take
    """
    global _gemm
    gemm = gemm or _aiter_gemm()
    if gemm is None:
        return CompressorPath(False, "the gate GEMM writes float32 itself; only aiter on ROCm writes bf16")
    root = installed_root()
    targets = None if root is None else compressor_targets(root)
    if targets is None:
        return CompressorPath(False, f"sglang {installed_version()} does not widen the compressor's scores")
    _refuse_online_compress()
    _gemm = gemm
    if targets.producer == GATE:
        ensure_hook(GATE, _gate_in_bf16)
    else:
        _rebind_gate_gemm()
    ensure_hook(targets.consumer, _compress_in_float32)
    return CompressorPath(True, f"{targets.producer} and {targets.consumer} are hooked")


def _gate_in_bf16(original: Callable[..., torch.Tensor], compressor: Any, x: torch.Tensor) -> torch.Tensor:
    """Around Compressor._compute_wkv_gate."""
    weight = getattr(compressor.wkv_gate, "weight", None)
    if weight is None:
        witness.decline(GATE_PATH, "the gate weight is in GGUF")
        return original(compressor, x)
    return _score(x, weight, lambda: original(compressor, x))


def _rebind_gate_gemm() -> None:
    module: Any = importlib.import_module(COMPRESSOR)
    original = module.linear_bf16_fp32
    if getattr(original, "weightprep_original", None) is not None:
        return

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _score(x, weight, lambda: original(x, weight))

    linear.weightprep_original = original  # type: ignore[attr-defined]
    module.linear_bf16_fp32 = linear


def _score(x: torch.Tensor, weight: torch.Tensor, upstream: Callable[[], torch.Tensor]) -> torch.Tensor:
    if _gemm is None or weight.dtype != torch.bfloat16 or x.dtype != torch.bfloat16:
        witness.decline(GATE_PATH, f"activations in {x.dtype}, gate weight in {weight.dtype}")
        return upstream()
    witness.count(GATE_PATH)
    return _gemm(x, weight)


def _compress_in_float32(
    original: Callable[..., torch.Tensor],
    kv_score_buffer: torch.Tensor,
    kv_score_input: torch.Tensor,
    ape: torch.Tensor,
    plan: Any,
    *,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    **rest: Any,
) -> torch.Tensor:
    """Around compress_forward: bf16 scores in, `ape` and a missing `out` in float32."""
    if rest.get("is_online") or kv_score_input.dtype != torch.bfloat16:
        witness.decline(COMPRESS_PATH, f"scores in {kv_score_input.dtype}, online={bool(rest.get('is_online'))}")
        return original(kv_score_buffer, kv_score_input, ape, plan, compress_ratio=compress_ratio, out=out, **rest)
    witness.count(COMPRESS_PATH)
    scores, bias = kv_score_input.contiguous(), ape.detach()
    if plan.is_decode:
        return compress_decode(kv_score_buffer, scores, bias, plan[1], ratio=compress_ratio, out=out)
    return compress_prefill(kv_score_buffer, scores, bias, plan[1], plan[2], ratio=compress_ratio, out=out)


def _aiter_gemm() -> Gemm | None:
    """aiter's tuned GEMM where sglang itself would use it for the gate."""
    from sglang.srt.utils import get_bool_env_var, is_hip

    if not (is_hip() and get_bool_env_var("SGLANG_USE_AITER")):
        return None
    from aiter.tuned_gemm import tgemm

    return lambda x, weight: tgemm.mm(x, weight, otype=x.dtype)


def _refuse_online_compress() -> None:
    from sglang.srt.environ import envs

    if envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get():
        raise EngineError(
            "SGLANG_OPT_USE_ONLINE_COMPRESS",
            found="online compress, whose kernels and states are float32 only",
            wanted="the plan-based compressor",
            remedy='unset the variable, or keep upstream\'s kernels with {"runtime": "upstream"}',
        )
