"""Runs each absorbed kernel once at startup, on real weights, against float32.

A kernel library whose stride or layout contract changed gives wrong numbers and no error. Served text shows that late;
one small matmul for each distinct path and shape shows it before the first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weightprep.errors import EngineError

__all__ = ["AbsorbKernels", "Sample", "dequantized", "run_canary"]

BATCHES = (1, 2, 17)
# A kernel may quantize its activations to e4m3 in groups (relative error 0.026 on normal data) and rounds its result to
# bf16 (0.002). Twice their sum leaves room for one unlucky batch; every fault of layout or scale is of order 1.
TOLERANCE = 0.056


class AbsorbKernels(Protocol):
    """The two matmuls as the server will run them.

    `q`: (M, heads, nope) x w_kc -> (M, heads, rank); `v`: (M, heads, rank) x w_vc -> (M, heads, v); all bf16.
    """

    def q(self, q_nope: torch.Tensor, sample: Sample) -> torch.Tensor: ...

    def v(self, attn_out: torch.Tensor, sample: Sample) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The absorbed weights of one layer, and where they are, for messages.

    :param w_kc: (heads, nope, rank)
    :param w_vc: (heads, rank, v)
    """

    where: str
    path: str
    w_kc: torch.Tensor
    w_vc: torch.Tensor
    w_scale: torch.Tensor | float

    @property
    def key(self) -> tuple[object, ...]:
        """Samples with the same key take the same kernel in the same way."""
        return (self.path, *((t.dtype, tuple(t.shape), tuple(t.stride())) for t in (self.w_kc, self.w_vc)))


def dequantized(weight: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """The float32 values of an absorbed weight in fp8 or bf16."""
    return weight.to(torch.float32) * scale


@torch.no_grad()
def run_canary(samples: Sequence[Sample], kernels: AbsorbKernels) -> int:
    """Run `kernels` on one sample of each distinct key; returns how many those are.

    :raises EngineError: a result differs from float32 by more than rounding can
    """
    distinct = {sample.key: sample for sample in reversed(samples)}
    for sample in distinct.values():
        heads, nope, rank = sample.w_kc.shape
        device = sample.w_kc.device
        generator = torch.Generator(device).manual_seed(0)
        w_kc, w_vc = dequantized(sample.w_kc, sample.w_scale), dequantized(sample.w_vc, sample.w_scale)
        for batch in BATCHES:
            q = torch.randn(batch, heads, nope, generator=generator, device=device).bfloat16()
            o = torch.randn(batch, heads, rank, generator=generator, device=device).bfloat16()
            _compare(sample, "q", batch, kernels.q(q, sample), torch.einsum("mhp,hpr->mhr", q.float(), w_kc))
            _compare(sample, "v", batch, kernels.v(o, sample), torch.einsum("mhr,hrv->mhv", o.float(), w_vc))
    return len(distinct)


def _compare(sample: Sample, which: str, batch: int, found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.float() - wanted).norm() / wanted.norm()) if found.shape == wanted.shape else float("inf")
    # a NaN is a failure too, and no comparison is true of one
    if not error <= TOLERANCE:
        raise EngineError(
            f"canary of {sample.where}: absorbed {which} of path '{sample.path}', {batch} token(s)",
            found=f"a relative error of {error:.3g} against float32",
            wanted=f"at most {TOLERANCE}",
            remedy="the kernel library computes something else than its interface says: use another version, "
            'or another backend ({"runtime": "..."}); {"canary": "off"} skips this check',
        )
