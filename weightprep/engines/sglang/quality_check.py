"""Compares prepared weights with the weights that they were made from: a wrong scale has the right dtype and shape.

Heads are judged one by one, because a sum over heads is that of the largest: one outlier that takes the whole range of
a per-tensor scale would hide that every other head became zero. It is measured while weights are prepared, because
afterwards sglang may repack the linear layer for another kernel, and on some heads only, because all of them would take
as long on a CPU as the preparation itself.
"""

from __future__ import annotations

import math

import torch

from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.e4m3 import decode_e4m3fn
from weightprep.transforms import Bundle, StepContext
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.stored_absorbed import reassemble

__all__ = ["measure_noise", "sqnr_db"]

# Evenly spaced over the heads of each rank, so more ranks look at more of them: all 64 of GLM on 8 ranks.
_HEADS = 8


@torch.no_grad()
def measure_noise(source: Bundle, prepared: Bundle, rows_per_head: int, name: str) -> torch.Tensor:
    """Sums of squares of signal and noise of each of some heads, float64 [heads, 2] on the weights' device.

    :param source: the linear's weight as the loader left it, these rows of kv_b_proj
    :param prepared: w_kc, w_vc and their scales, made of it or taken from a sidecar
    :param name: the module's, for errors
    """
    heads = source.encoded.rows // rows_per_head
    norms = []
    for head in range(0, heads, max(1, heads // _HEADS)):
        wanted = _source_rows(source, head * rows_per_head, (head + 1) * rows_per_head, name)
        noise = _prepared_rows(prepared, head, wanted.shape).sub_(wanted)
        norms.append(torch.stack([torch.linalg.vector_norm(wanted), torch.linalg.vector_norm(noise)]))
    return torch.stack(norms).double().square()


def sqnr_db(sums: torch.Tensor) -> float:
    """Signal to quantization noise of the worst head in dB: infinite without noise, as for a head of zeros, and minus
    infinite where something is not finite or noise has no signal.

    :param sums: see measure_noise
    """
    return min((_head_db(signal, noise) for signal, noise in sums.tolist()), default=math.inf)


def _head_db(signal: float, noise: float) -> float:
    if noise == 0 and math.isfinite(signal):
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(signal + noise) else -math.inf


def _source_rows(source: Bundle, start: int, stop: int, name: str) -> torch.Tensor:
    part = source.encoded.slice_rows(start, stop)
    scale = source.get("scale")
    if scale is not None and part.scale_rows is not None:
        scale = scale[slice(*part.scale_rows)]
    rows = Bundle.source(source["weight"][start:stop], scale, part.encoded)
    return dequantize(rows, StepContext(name=name))["weight"].to(torch.float32)


def _prepared_rows(prepared: Bundle, head: int, shape: torch.Size) -> torch.Tensor:
    """The rows of kv_b_proj that the absorbed weights of `head` stand for, float32."""
    one = {role: tensor if role == "w_scale" else tensor[head : head + 1] for role, tensor in prepared.items()}
    if prepared.encoded.encoding is Encoding.MXFP4:
        return reassemble(Bundle(one, EncodedShape(Encoding.MXFP4, *shape)))
    k, v = (_numbers(one[role], one.get("w_scale")) for role in ("w_kc", "w_vc"))
    return torch.cat([k, v.transpose(1, 2)], dim=1).flatten(0, 1)


def _numbers(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    # a NaN code comes out as 480; the contract of the tensor refuses it
    numbers = decode_e4m3fn(weight) if weight.dtype is torch.float8_e4m3fn else weight.to(torch.float32)
    # with bf16+fp8 one of the two weights has no scale
    return numbers if scale is None or weight.dtype is torch.bfloat16 else numbers.mul_(scale)
