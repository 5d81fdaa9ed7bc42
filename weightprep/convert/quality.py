"""What a conversion costs: the stored numbers against the source's, a slice at a time.

Differences are taken in float32 and summed in float64, whose range holds the square of any float32: the figures are
the same at every magnitude of the weight.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

from weightprep.checkpoint.manifest import QualityRecord
from weightprep.convert.slices import rows_per_slice, slices
from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import Encoding
from weightprep.formats.e4m3 import decode_e4m3fn
from weightprep.transforms import Bundle, StepContext
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.stored_absorbed import reassemble

__all__ = ["describe", "is_below", "judged_db", "measure", "record_of"]


def measure(source: Bundle, stored: Bundle, *, heads: int | None, name: str) -> QualityRecord:
    """Compare `stored`, a whole weight or its absorbed matrices, with `source`, a whole weight [N, K].

    :param heads: the rows are this many heads of equal size; None where they are none
    :param name: the source tensor's name, for errors
    :raises CheckpointError: a value that is not finite has come out
    """
    rows = source.encoded.rows
    step = rows_per_slice(source.encoded, len(stored["w_kc"]) if stored.absorbed else None)
    signal, noise = torch.empty(2, rows, dtype=torch.float64)
    row_amax = torch.empty(rows)
    largest_error = 0.0
    for start, original, result in zip(range(0, rows, step), _values(source, step), _values(stored, step), strict=True):
        part = slice(start, start + step)
        difference = result.sub_(original)
        signal[part] = _square_sums(original)
        noise[part] = _square_sums(difference)
        largest_error = max(largest_error, float(difference.abs_().max()))
        torch.amax(original.abs_(), dim=1, out=row_amax[part])
    by_head = (heads or 1, -1)
    amax = row_amax.view(by_head).amax(dim=1).tolist()
    return record_of(
        signal.view(by_head).sum(dim=1).tolist(),
        noise.view(by_head).sum(dim=1).tolist(),
        max_error=largest_error,
        amax=max(amax),
        head_amax=amax if heads is not None else [],
        name=name,
    )


def record_of(
    signal: Sequence[float],
    noise: Sequence[float],
    *,
    max_error: float,
    amax: float,
    head_amax: Sequence[float],
    name: str,
) -> QualityRecord:
    """The figures that follow from sums of squares and extremes.

    :param signal: sum of the squares of the numbers of each head of the source, or one sum where rows are not heads
    :param noise: the same of their errors
    :param head_amax: largest magnitude of each head; empty where the rows are not heads
    :param name: the source tensor's name, for errors
    :raises CheckpointError: a value that is not finite has come out
    """
    signals, noises = sum(signal), sum(noise)
    if not (math.isfinite(signals) and math.isfinite(noises) and math.isfinite(max_error)):
        raise CheckpointError(
            name,
            found="a value that is not finite in the converted weight",
            wanted="finite numbers",
            remedy="the weight is too large for this precision: keep it as it is, with another --precision",
        )
    smallest = min(head_amax, default=0.0)
    heads = [_db(s, n) for s, n in zip(signal, noise, strict=True) if n] if head_amax else []
    return QualityRecord(
        relative_error=_rounded(math.sqrt(noises / signals)) if signals else float(noises > 0),
        sqnr_db=_db(signals, noises) if noises and signals else None,
        worst_head_sqnr_db=min(heads, default=None),
        max_error=max_error,
        amax=amax,
        head_amax_ratio=_rounded(amax / smallest) if smallest > 0 else None,
    )


def judged_db(quality: QualityRecord) -> float | None:
    """The figure that a floor applies to: the worst head's, because a sum over heads is that of the largest."""
    return quality.sqnr_db if quality.worst_head_sqnr_db is None else quality.worst_head_sqnr_db


def is_below(quality: QualityRecord, floor: float | None) -> bool:
    """Whether a module misses `floor`, in dB of SQNR; noise without any signal misses every floor."""
    if floor is None or quality.relative_error == 0:
        return False
    judged = judged_db(quality)
    return judged is None or judged < floor


def describe(quality: QualityRecord) -> str:
    """What a module below its floor has."""
    db = judged_db(quality)
    if db is None:
        return "no signal, only noise"
    return f"{db:.2f} dB SQNR" + (" of its worst head" if quality.worst_head_sqnr_db is not None else "")


def _values(bundle: Bundle, step: int) -> Iterator[torch.Tensor]:
    """The weight in float32, `step` rows at a time, in memory of its own."""
    for part in slices(bundle, step):
        if part.absorbed:
            yield reassemble(part)
        elif part.encoded.encoding is Encoding.FP8_TENSOR:
            yield decode_e4m3fn(part["weight"]).mul_(part["scale"])
        else:
            yield dequantize(part, StepContext())["weight"].to(torch.float32, copy=True)


def _square_sums(values: torch.Tensor) -> torch.Tensor:
    """Of each row, float64."""
    return values.double().square_().sum(dim=1)


def _db(signal: float, noise: float) -> float:
    # JSON has no infinity: without any signal it is as little as a float can say.
    signal = signal or sys.float_info.min
    return _rounded(10 * math.log10(signal / noise))


def _rounded(value: float) -> float:
    """Four digits: sums in another order, on another processor, must not change a manifest."""
    return float(f"{value:.4g}")
