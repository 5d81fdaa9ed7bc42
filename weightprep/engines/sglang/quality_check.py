"""Compares prepared weights with the weights that they were made from: a wrong scale has the right dtype and shape.

It is measured while weights are prepared, because afterwards sglang may repack the linear layer for another kernel, and
on some heads only, because all of them would take as long on a CPU as the preparation itself.
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

# Evenly spaced over the heads of each rank, so more ranks look at more of them.
_HEADS = 4


@torch.no_grad()
def measure_noise(source: Bundle, prepared: Bundle, rows_per_head: int, name: str) -> torch.Tensor:
    """Sums of squares of signal and noise of some heads, float64 [2] on the weights' device.

    :param source: the linear's weight as the loader left it, these rows of kv_b_proj
    :param prepared: w_kc, w_vc and their scales, made of it or taken from a sidecar
    :param name: the module's, for errors
    """
    heads = source.encoded.rows // rows_per_head
    sums = torch.zeros(2, dtype=torch.float64, device=source["weight"].device)
    for head in range(0, heads, max(1, heads // _HEADS)):
        wanted = _source_rows(source, head * rows_per_head, (head + 1) * rows_per_head, name)
        noise = _prepared_rows(prepared, head, wanted.shape) - wanted
        sums += torch.stack([wanted.double().square().sum(), noise.double().square().sum()])
    return sums


def sqnr_db(sums: torch.Tensor) -> float:
    """Signal to quantization noise in dB; infinite without noise."""
    signal, noise = sums.tolist()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


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
    rows = torch.cat([one["w_kc"].to(torch.float32), one["w_vc"].to(torch.float32).transpose(1, 2)], dim=1).flatten(
        0, 1
    )
    return rows * one["w_scale"] if "w_scale" in one else rows


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    return decode_e4m3fn(weight) if weight.dtype is torch.float8_e4m3fn else weight.to(torch.float32)
