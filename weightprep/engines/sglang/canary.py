"""Runs each absorbed kernel once at startup, on real weights, against float32.

A kernel library whose stride or layout contract changed gives wrong numbers and no error. Served text shows that late;
one small matmul for each distinct path and shape shows it before the first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weightprep.errors import EngineError
from weightprep.runtime.reference import absorb_reference

__all__ = ["AbsorbKernels", "Sample", "run_canary"]

BATCHES = [1, 2, 17]
# A kernel may quantize its activations to e4m3 in groups (relative error 0.026 on normal data) and rounds its result to
# bf16 (0.002). Twice their sum leaves room for one unlucky batch; every fault of layout or scale is of order 1.
TOLERANCE = 0.056
# There the activations are MXFP4 too: 0.10 to 0.12 against the dequantized weights (formats.mx, normal data, K of 128,
# 192 and 512). About twice that, for the same reason.
MXFP4_TOLERANCE = 0.25
# Without a GPU the product is that of one head after the other, and all of GLM's would take half a second of a core.
_CPU_HEADS = 8


class AbsorbKernels(Protocol):
    """The two matmuls as the server will run them.

    `q`: (M, heads, nope) x w_kc -> (M, heads, rank); `v`: (M, heads, rank) x w_vc -> (M, heads, v); all bf16.
    """

    def q(self, q_nope: torch.Tensor, sample: Sample) -> torch.Tensor: ...

    def v(self, attn_out: torch.Tensor, sample: Sample) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The absorbed weights of one layer, and where they are, for messages.

    :param w_kc: (heads, nope, rank), packed fp4 (heads, nope / 2, rank)
    :param w_vc: (heads, rank, v), packed fp4 (heads, rank / 2, v)
    """

    where: str
    path: str
    w_kc: torch.Tensor
    w_vc: torch.Tensor
    w_scale: torch.Tensor | float
    w_scale_k: torch.Tensor | None = None
    w_scale_v: torch.Tensor | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Samples with the same key take the same kernel in the same way."""
        return (self.path, *((t.dtype, tuple(t.shape), tuple(t.stride())) for t in (self.w_kc, self.w_vc)))

    def first_heads(self, count: int) -> Sample:
        """The same layer with its first `count` heads alone, strides kept."""
        w_scale_k, w_scale_v = (None if t is None else t[:count] for t in (self.w_scale_k, self.w_scale_v))
        return replace(self, w_kc=self.w_kc[:count], w_vc=self.w_vc[:count], w_scale_k=w_scale_k, w_scale_v=w_scale_v)

    def scales_of(self, role: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The per-tensor scale and the MXFP4 scales of w_kc or w_vc, as weightprep.runtime takes them."""
        weight = self.w_kc if role == "w_kc" else self.w_vc
        if weight.dtype is torch.uint8:
            return None, self.w_scale_k if role == "w_kc" else self.w_scale_v
        if weight.dtype is torch.bfloat16:
            return None, None
        return (self.w_scale if isinstance(self.w_scale, torch.Tensor) else None), None


@torch.no_grad()
def run_canary(samples: Sequence[Sample], kernels: AbsorbKernels) -> int:
    """Run `kernels` on one sample of each distinct key; returns how many those are.

    :raises EngineError: a result differs from float32 by more than rounding can
    """
    distinct = {sample.key: sample for sample in reversed(samples)}
    for whole in distinct.values():
        sample = whole.first_heads(_CPU_HEADS) if whole.w_kc.device.type == "cpu" else whole
        packing = 2 if sample.w_kc.dtype is torch.uint8 else 1
        heads, nope, rank = sample.w_kc.shape
        device = sample.w_kc.device
        generator = torch.Generator(device).manual_seed(0)
        tokens = sum(BATCHES)
        q = torch.randn(tokens, heads, nope * packing, generator=generator, device=device).bfloat16()
        o = torch.randn(tokens, heads, rank, generator=generator, device=device).bfloat16()
        # tokens are independent of each other in the reference, so it widens each weight once for all batches
        wanted_q = torch.split(absorb_reference(q, sample.w_kc, *sample.scales_of("w_kc")), BATCHES)
        wanted_v = torch.split(absorb_reference(o, sample.w_vc, *sample.scales_of("w_vc")), BATCHES)
        for given, wanted in zip(torch.split(q, BATCHES), wanted_q, strict=True):
            _compare(sample, "q", kernels.q(given, sample), wanted)
        for given, wanted in zip(torch.split(o, BATCHES), wanted_v, strict=True):
            _compare(sample, "v", kernels.v(given, sample), wanted)
    return len(distinct)


def _compare(sample: Sample, which: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = MXFP4_TOLERANCE if sample.w_kc.dtype is torch.uint8 else TOLERANCE
    is_shaped = found.shape == wanted.shape
    error = float((found.float() - wanted).norm() / wanted.norm()) if is_shaped else float("inf")
    # a NaN is a failure too, and no comparison is true of one
    if not error <= tolerance:
        raise EngineError(
            f"canary of {sample.where}: absorbed {which} of path '{sample.path}', {len(wanted)} token(s)",
            found=f"a relative error of {error:.3g} against float32",
            wanted=f"at most {tolerance}",
            remedy="the kernel library computes something else than its interface says: use another version, "
            'or another backend ({"runtime": "..."}); {"canary": "off"} skips this check',
        )
