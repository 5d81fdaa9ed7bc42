"""A weight in slices of whole rows, or of whole heads, so that a conversion never holds a float32 copy of all of it.

A slice is treated as the rows of a tensor parallel rank: the largest magnitude is agreed on over all of them first,
so the result is, bit for bit, that of the whole weight.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from weightprep.deferred import torch
from weightprep.formats import EncodedShape
from weightprep.transforms import Bundle, Step, StepContext, check_composition, measure_amax, run_steps
from weightprep.transforms.split_kv_b import kv_b_shape

__all__ = ["rows_per_slice", "run_in_slices", "slices"]

# 4 MB in float32: small beside the weight, large enough that the calls cost nothing.
_SLICE_ELEMENTS = 2**20
# Slices start where blocks of scales do, so that a step that makes blocks makes the same ones.
_ALIGNMENT = 128


def rows_per_slice(encoded: EncodedShape, heads: int | None = None) -> int:
    """Rows of a slice of a weight: those of whole heads, where it is `heads` of them, else a multiple of 128."""
    unit = _ALIGNMENT if heads is None else encoded.rows // heads
    return max(unit, _SLICE_ELEMENTS // encoded.cols // unit * unit) if encoded.rows > unit else encoded.rows


def slices(bundle: Bundle, step: int) -> Iterator[Bundle]:
    """Views of `step` rows at a time of a whole weight and its scale, or of the heads that these rows have become."""
    encoded = bundle.encoded
    for start in range(0, encoded.rows, step):
        stop = min(start + step, encoded.rows)
        part = encoded.slice_rows(start, stop)
        if bundle.absorbed:
            per_head = encoded.rows // len(bundle["w_kc"])
            heads = slice(start // per_head, stop // per_head)
            # the one scale of all heads has no dimension
            tensors = {role: tensor[heads] if tensor.dim() else tensor for role, tensor in bundle.items()}
        else:
            tensors = {"weight": bundle["weight"][start:stop]}
            if "scale" in bundle:
                scale, rows = bundle["scale"], part.scale_rows
                tensors["scale"] = scale if rows is None else scale[rows[0] : rows[1]]
        yield Bundle(tensors, part.encoded)


def run_in_slices(steps: Sequence[Step], bundle: Bundle, dims: Mapping[str, int], name: str) -> Bundle:
    """What `run_steps` makes of `bundle`, a whole weight [N, K]; absorbed results are made some heads at a time.

    :param name: the tensor's name, for errors
    :raises CheckpointError: a value cannot be converted
    """
    encoded = bundle.encoded
    absorbs = check_composition(steps, bundle.form, name).absorbed
    if absorbs and (encoded.rows, encoded.cols) != kv_b_shape(dims):
        # refused, as the weight that it is and not as a slice of it
        return run_steps(steps, bundle, StepContext(dims=dims, name=name))
    parts = list(slices(bundle, rows_per_slice(encoded, dims["heads"] if absorbs else None)))
    contexts = [StepContext(dims=_local(dims, part, encoded) if absorbs else dims, name=name) for part in parts]
    amax: torch.Tensor | None = None
    for part, context in zip(parts, contexts, strict=True):
        measured = measure_amax(steps, part, context)
        if measured is not None:
            amax = measured if amax is None else torch.maximum(amax, measured)
    made = (run_steps(steps, p, replace(context, amax=amax)) for p, context in zip(parts, contexts, strict=True))
    return _join(made, encoded)


def _local(dims: Mapping[str, int], part: Bundle, whole: EncodedShape) -> Mapping[str, int]:
    return {**dims, "heads": dims["heads"] * part.encoded.rows // whole.rows}


def _join(parts: Iterable[Bundle], whole: EncodedShape) -> Bundle:
    """One bundle of consecutive slices of `whole`, each given up as soon as it is copied."""
    joined: dict[str, torch.Tensor] = {}
    scales: list[torch.Tensor] = []
    encoded = whole
    done = 0
    for part in parts:
        encoded = replace(part.encoded, rows=whole.rows, cols=whole.cols, row_offset=0)
        for role, tensor in part.items():
            if role == "scale":
                # of so many rows as the blocks make
                scales.append(tensor)
            elif tensor.dim() == 0:
                joined[role] = tensor
            else:
                if role not in joined:
                    joined[role] = _room_for(tensor, len(tensor) * whole.rows // part.encoded.rows)
                start = done * len(tensor) // part.encoded.rows
                joined[role][start : start + len(tensor)] = tensor
        done += part.encoded.rows
    if scales:
        joined["scale"] = scales[0] if encoded.scale_shape == () else torch.cat(scales)
    return Bundle(joined, encoded)


def _room_for(part: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros like `part`, in the same memory order, but of `length` in the first dimension."""
    order = [0, *sorted(range(1, part.dim()), key=part.stride, reverse=True)]
    shape = (length, *part.shape[1:])
    # as in `read_slices`
    memory = mmap.mmap(-1, math.prod(shape) * part.element_size())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(part.dtype)
    return flat.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(part.dim())])
