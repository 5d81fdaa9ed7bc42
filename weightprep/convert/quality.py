"""What a conversion costs: the stored numbers against the source's, both in float32, a few heads at a time.

In slices, because two float32 copies of a 29 MB weight would be most of a conversion's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from weightprep.checkpoint.manifest import QualityRecord
from weightprep.transforms import Bundle, StepContext
from weightprep.transforms.dequantize import dequantize

__all__ = ["measure"]

_SLICE_ELEMENTS = 2**20


def measure(source: Bundle, stored: Bundle, *, heads: int | None) -> QualityRecord:
    """Compare `stored` with `source`, whole weights [N, K] of one shape.

    :param heads: the rows are this many heads of equal size, for the head-amax ratio; None where they are not
    """
    rows, cols = source.encoded.rows, source.encoded.cols
    per_head = rows // heads if heads and rows % heads == 0 else rows
    step = max(1, _SLICE_ELEMENTS // (per_head * cols)) * per_head if heads else max(1, _SLICE_ELEMENTS // cols)
    noise = signal = largest_error = 0.0
    amaxes: list[float] = []
    for original, result in zip(_slices(source, step), _slices(stored, step), strict=True):
        difference = result.sub_(original)
        signal += _square_sum(original)
        noise += _square_sum(difference)
        largest_error = max(largest_error, float(difference.abs_().max()))
        amaxes += original.abs_().view(-1, min(per_head, original.shape[0]) * cols).amax(dim=1).tolist()
    return QualityRecord(
        relative_error=_rounded(math.sqrt(noise / signal)) if signal else 0.0,
        sqnr_db=_rounded(10 * math.log10(signal / noise)) if noise and signal else None,
        max_error=largest_error,
        amax=max(amaxes),
        head_amax_ratio=_rounded(max(amaxes) / min(amaxes)) if heads and min(amaxes) > 0 else None,
    )


def _slices(bundle: Bundle, step: int) -> Iterator[torch.Tensor]:
    """The weight in float32, `step` rows at a time, in memory of its own."""
    for start in range(0, bundle.encoded.rows, step):
        stop = min(start + step, bundle.encoded.rows)
        part = bundle.encoded.slice_rows(start, stop)
        tensors = {"weight": bundle["weight"][start:stop]}
        if "scale" in bundle:
            scale = bundle["scale"]
            tensors["scale"] = scale if part.scale_rows is None else scale[part.scale_rows[0] : part.scale_rows[1]]
        values = dequantize(Bundle(tensors, part.encoded), StepContext())["weight"]
        yield values.to(torch.float32, copy=True)


def _square_sum(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square())


def _rounded(value: float) -> float:
    """Six digits: sums in another order, by another number of threads, must not change a manifest."""
    return float(f"{value:.6g}")
