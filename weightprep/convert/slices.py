"""A weight in slices of whole rows, so that a conversion never holds a float32 copy of all of it.

A slice is treated as the rows of a tensor parallel rank: the largest magnitude is agreed on over all of them first,
so the result is, bit for bit, that of the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from weightprep.deferred import torch
from weightprep.transforms import Bundle, Step, StepContext, check_composition, measure_amax, run_steps

__all__ = ["rows_per_slice", "run_in_slices", "slices"]

# 4 MB in float32: small beside the weight, large enough that the calls cost nothing.
_SLICE_ELEMENTS = 2**20
# Slices start where blocks of scales do, so that a step that makes blocks makes the same ones.
_ALIGNMENT = 128


def rows_per_slice(rows: int, cols: int) -> int:
    """Rows of a slice, a multiple of 128, of a weight [rows, cols]."""
    return max(_ALIGNMENT, _SLICE_ELEMENTS // cols // _ALIGNMENT * _ALIGNMENT) if rows > _ALIGNMENT else rows


def slices(bundle: Bundle, step: int) -> Iterator[Bundle]:
    """Views of `step` rows at a time of a whole weight and its scale."""
    encoded = bundle.encoded
    for start in range(0, encoded.rows, step):
        stop = min(start + step, encoded.rows)
        part = encoded.slice_rows(start, stop)
        tensors = {"weight": bundle["weight"][start:stop]}
        if "scale" in bundle:
            scale, rows = bundle["scale"], part.scale_rows
            tensors["scale"] = scale if rows is None else scale[rows[0] : rows[1]]
        yield Bundle(tensors, part.encoded)


def run_in_slices(steps: Sequence[Step], bundle: Bundle, dims: Mapping[str, int], name: str) -> Bundle:
    """What `run_steps` makes of `bundle`, a whole weight [N, K]; absorbed results have no rows and are made at once.

    :param name: the tensor's name, for errors
    :raises CheckpointError: a value cannot be converted
    """
    if check_composition(steps, bundle.form, name).absorbed:
        return run_steps(steps, bundle, StepContext(dims=dims, name=name))
    step = rows_per_slice(bundle.encoded.rows, bundle.encoded.cols)
    parts = list(slices(bundle, step))
    context = StepContext(dims=dims, name=name)
    amax: torch.Tensor | None = None
    for part in parts:
        measured = measure_amax(steps, part, context)
        if measured is not None:
            amax = measured if amax is None else torch.maximum(amax, measured)
    context = StepContext(dims=dims, name=name, amax=amax)
    return _join((run_steps(steps, part, context) for part in parts), bundle)


def _join(parts: Iterable[Bundle], whole: Bundle) -> Bundle:
    """One bundle of consecutive row slices, each given up as soon as its rows are copied."""
    rows, cols = whole.encoded.rows, whole.encoded.cols
    weight: torch.Tensor | None = None
    scales: list[torch.Tensor] = []
    encoded = whole.encoded
    done = 0
    for part in parts:
        if weight is None:
            encoded = replace(part.encoded, rows=rows, cols=cols, row_offset=0)
            weight = part["weight"].new_empty((rows, *part["weight"].shape[1:]))
        weight[done : done + part.encoded.rows] = part["weight"]
        done += part.encoded.rows
        if "scale" in part:
            scales.append(part["scale"])
    if weight is None:
        return whole
    if not scales:
        return Bundle({"weight": weight}, encoded)
    return Bundle({"weight": weight, "scale": scales[0] if encoded.scale_shape == () else torch.cat(scales)}, encoded)
