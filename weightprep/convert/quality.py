"""What a conversion costs: the stored numbers against the source's, a slice at a time.

Differences are taken in float32 and summed in float64, whose range holds the square of any float32: the figures are
the same at every magnitude of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weightprep.checkpoint.manifest import QualityRecord
from weightprep.convert.slices import rows_per_slice, slices
from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.e4m3 import decode_e4m3fn
from weightprep.transforms import Bundle, StepContext
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.stored_absorbed import reassemble

__all__ = ["has_uneven_heads", "is_below", "measure", "record_of"]

# e4m3fn has 14.8 octaves of normal numbers. Under one scale a head with 2^10 times less than the largest keeps 4.8 of
# them, and what lies below loses its mantissa bits one by one; a sum over all heads does not show it.
_UNEVEN = 2.0**10


def measure(source: Bundle, stored: Bundle, *, heads: int | None, name: str) -> QualityRecord:
    """Compare `stored`, a whole weight or its absorbed matrices, with `source`, a whole weight [N, K].

    :param heads: the rows are this many heads of equal size, for the head-amax ratio; None where they are not
    :param name: the source tensor's name, for errors
    :raises CheckpointError: a value that is not finite has come out
    """
    rows, cols = source.encoded.rows, source.encoded.cols
    step = rows_per_slice(rows, cols)
    if stored.absorbed:
        stored = Bundle({"weight": reassemble(stored)}, EncodedShape(Encoding.FP32, rows, cols))
    noise = signal = largest_error = 0.0
    row_amax = torch.empty(rows)
    for start, original, result in zip(range(0, rows, step), _values(source, step), _values(stored, step), strict=True):
        difference = result.sub_(original)
        signal += _square_sum(original)
        noise += _square_sum(difference)
        largest_error = max(largest_error, float(difference.abs_().max()))
        torch.amax(original.abs_(), dim=1, out=row_amax[start : start + step])
    head_amax = row_amax.view(heads, -1).amax(dim=1) if heads and rows % heads == 0 else row_amax[:0]
    amax = float(row_amax.max())
    return record_of(signal, noise, max_error=largest_error, amax=amax, head_amax=head_amax.tolist(), name=name)


def record_of(
    signal: float, noise: float, *, max_error: float, amax: float, head_amax: Sequence[float], name: str
) -> QualityRecord:
    """The figures that follow from sums of squares and extremes.

    :param signal: sum of the squares of the source's numbers
    :param noise: sum of the squares of their errors
    :param head_amax: largest magnitude of each head; empty where the rows are not heads
    :param name: the source tensor's name, for errors
    :raises CheckpointError: a value that is not finite has come out
    """
    if not (math.isfinite(signal) and math.isfinite(noise) and math.isfinite(max_error)):
        raise CheckpointError(
            name,
            found="a value that is not finite in the converted weight",
            wanted="finite numbers",
            remedy="the weight is too large for this precision: keep it as it is, with another --precision",
        )
    smallest = min(head_amax, default=0.0)
    return QualityRecord(
        relative_error=_rounded(math.sqrt(noise / signal)) if signal else float(noise > 0),
        sqnr_db=_rounded(10 * math.log10(signal / noise)) if noise and signal else None,
        max_error=max_error,
        amax=amax,
        head_amax_ratio=_rounded(amax / smallest) if smallest > 0 else None,
    )


def is_below(quality: QualityRecord, floor: float | None) -> bool:
    """Whether a module misses `floor`, in dB of SQNR; noise without any signal misses every floor."""
    if floor is None or quality.relative_error == 0:
        return False
    return quality.sqnr_db is None or quality.sqnr_db < floor


def has_uneven_heads(quality: QualityRecord) -> bool:
    """Whether the smallest head loses bits under the scale of the largest, which SQNR of the whole weight hides."""
    return quality.head_amax_ratio is not None and quality.head_amax_ratio > _UNEVEN


def _values(bundle: Bundle, step: int) -> Iterator[torch.Tensor]:
    """The weight in float32, `step` rows at a time, in memory of its own."""
    for part in slices(bundle, step):
        if part.encoded.encoding is Encoding.FP8_TENSOR:
            yield decode_e4m3fn(part["weight"]).mul_(part["scale"])
        else:
            yield dequantize(part, StepContext())["weight"].to(torch.float32, copy=True)


def _square_sum(values: torch.Tensor) -> float:
    flat = values.view(-1).double()
    return float(torch.dot(flat, flat))


def _rounded(value: float) -> float:
    """Four digits: sums in another order, on another processor, must not change a manifest."""
    return float(f"{value:.4g}")
