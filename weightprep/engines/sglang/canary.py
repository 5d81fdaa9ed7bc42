"""Runs each absorbed kernel once at startup, on real weights, against float32.

A kernel library whose stride or layout contract changed gives wrong numbers and no error. Served text shows that late;
one small matmul for each distinct path and shape shows it before the first request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weightprep.errors import EngineError
from weightprep.runtime.reference import absorb_reference

__all__ = ["AbsorbKernels", "Sample", "run_canary"]

BATCHES = [1, 2, 17]
# A kernel may quantize its activations to e4m3 in groups (relative error 0.026 on normal data) and rounds its result to
# bf16 (0.002). Twice their sum leaves room for one unlucky batch or head: the worst of 64 heads has 0.030 if its weight
# is random, 0.045 at rank 8 and 0.054 at rank 4 (30 times each). Every fault of layout or scale is of order 1.
TOLERANCE = 0.056
# There the activations are MXFP4 too: 0.10 to 0.12 against the dequantized weights (formats.mx, normal data, K of 128,
# 192 and 512; the worst of 64 heads 0.144). About twice that, for the same reason.
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
        _check(sample, "q", kernels.q, q, absorb_reference(q, sample.w_kc, *sample.scales_of("w_kc")))
        _check(sample, "v", kernels.v, o, absorb_reference(o, sample.w_vc, *sample.scales_of("w_vc")))
    return len(distinct)


def _check(
    sample: Sample,
    which: str,
    kernel: Callable[[torch.Tensor, Sample], torch.Tensor],
    given: torch.Tensor,
    wanted: torch.Tensor,
) -> None:
    """Judge each batch over all heads, and each head over all batches.

    In a norm over 64 heads one that is wrong is an eighth. A single token of one head is no measure of it: where the
    head's weight is of low rank, the token may lie where that has nearly no signal.

    :param wanted: for all tokens of `given`, which are independent of each other, so it widens each weight once
    """
    noise, signal = [], []
    for batch, exact in zip(torch.split(given, BATCHES), torch.split(wanted, BATCHES), strict=True):
        found = kernel(batch, sample)
        signal.append(_energies(exact))
        is_shaped = found.shape == exact.shape
        noise.append(_energies(found.float() - exact) if is_shaped else torch.full_like(signal[-1], math.inf))
    noises, signals = torch.stack(noise), torch.stack(signal)
    for size, error in zip(BATCHES, _ratios(noises.sum(1), signals.sum(1)), strict=True):
        _judge(sample, which, f"{size} token(s)", error)
    for head, error in enumerate(_ratios(noises.sum(0), signals.sum(0))):
        _judge(sample, which, f"head {head}", error)


def _energies(out: torch.Tensor) -> torch.Tensor:
    """Of each head of `out` (M, heads, N), for one token, so that a batch of 1 counts as much as one of 17."""
    return out.double().square().sum((0, 2)) / len(out)


def _ratios(noise: torch.Tensor, signal: torch.Tensor) -> list[float]:
    # a head of zeros has no signal, and must have no noise; what is NaN stays so
    return torch.where(noise == 0, 0.0, noise / signal).sqrt().tolist()


def _judge(sample: Sample, which: str, of: str, error: float) -> None:
    tolerance = MXFP4_TOLERANCE if sample.w_kc.dtype is torch.uint8 else TOLERANCE
    # a NaN is a failure too, and no comparison is true of one
    if not error <= tolerance:
        raise EngineError(
            f"canary of {sample.where}: absorbed {which} of path '{sample.path}', {of}",
            found=f"a relative error of {error:.3g} against float32",
            wanted=f"at most {tolerance}",
            remedy="the kernel library computes something else than its interface says: use another version, "
            'or another backend ({"runtime": "..."}); {"canary": "off"} skips this check',
        )
