"""Converts a bf16 weight to fp8 under one scale, the commonest conversion, without torch and a slice at a time.

Two passes over the weight: the first counts the codes of each head, and from the counts follow the amax, the table of
the 65,536 possible results and every figure of quality; the second looks the results up. :func:`weightprep.convert.
module.convert_module` gives the same bytes and the same record by the recipe's steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightprep.checkpoint.manifest import ModuleRecord, QualityRecord
from weightprep.checkpoint.reader import changed_while_read, read_slices
from weightprep.checkpoint.repository import TensorRef
from weightprep.checkpoint.writer import as_bytes
from weightprep.convert.module import module_record
from weightprep.convert.plan import ModuleJob
from weightprep.convert.quality import record_of
from weightprep.formats import Encoding
from weightprep.formats.e4m3_table import (
    bf16_values,
    count_codes,
    decode_table,
    encode_table,
    look_up_codes,
    multiplier,
)
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.quantize_fp8 import not_finite, quantize_fp8

__all__ = ["WriteSlices", "convert_by_table", "has_table"]

# Takes a tensor's name and its bytes in order; see ShardWriter.write_slices.
WriteSlices = Callable[[str, Iterable[NDArray[np.uint8]]], None]

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80
# Small beside a weight, large enough that the calls cost nothing.
_SLICE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Head:
    """The bf16 codes of one head, ascending, and how often each stands in it."""

    codes: NDArray[np.uint16]
    counts: NDArray[np.int64]

    @property
    def largest(self) -> int:
        """The code of the amax: magnitudes of bf16 are ordered as their codes are."""
        return int((self.codes & _MAGNITUDE).max())


def has_table(job: ModuleJob) -> bool:
    """Whether `job` is the conversion that this module does."""
    steps = [step for step in job.plan.store if step.transform is not dequantize]
    return (
        job.source.encoded.encoding is Encoding.BF16
        and [step.transform for step in steps] == [quantize_fp8]
        and steps[0].params["granularity"] == "tensor"
    )


def convert_by_table(job: ModuleJob, dims: Mapping[str, int], file: str, write: WriteSlices) -> ModuleRecord:
    """Write what `convert_module` makes of a job for which `has_table` says yes.

    :param file: the file that the result goes into, for the record
    :raises CheckpointError: a value cannot be converted (NaN, infinity), or the source cannot be read
    """
    source = job.source.weight
    heads = job.heads(dims)
    counted = _count_heads(source, heads or 1)
    largest = max(head.largest for head in counted)
    if largest >= _INFINITY:
        raise not_finite(source.name)
    m, scale = multiplier(bf16_values()[largest])
    table = encode_table(m)

    source_hash, target_hash = hashlib.sha256(), hashlib.sha256()

    def converted() -> Iterator[NDArray[np.uint8]]:
        for raw in read_slices(source, _stops(source.nbytes, _SLICE_BYTES)):
            source_hash.update(raw)
            codes: NDArray[np.uint16] = np.frombuffer(raw, dtype=np.uint16)
            if (codes & _MAGNITUDE).max() > largest:
                raise changed_while_read(source, f"larger numbers in {source.name!r} than a moment before")
            found = look_up_codes(table, codes)
            target_hash.update(found.data)
            yield found

    scales = as_bytes(np.full(job.outputs["scale"].shape, scale))
    write(job.outputs["weight"].name, converted())
    write(job.outputs["scale"].name, [np.frombuffer(scales, dtype=np.uint8)])
    return module_record(
        job,
        file,
        source_sha256={source.name: source_hash.hexdigest()},
        target_sha256={
            job.outputs["weight"].name: target_hash.hexdigest(),
            job.outputs["scale"].name: hashlib.sha256(scales).hexdigest(),
        },
        scale=float(scale),
        quality=_quality(counted, table, scale, has_heads=heads is not None, name=source.name),
    )


def _stops(nbytes: int, step: int) -> list[int]:
    return [*range(step, nbytes, step), nbytes]


def _count_heads(weight: TensorRef, heads: int) -> list[_Head]:
    per_head = weight.nbytes // heads
    stops = sorted({*_stops(weight.nbytes, per_head), *_stops(weight.nbytes, _SLICE_BYTES)})
    found = []
    done = 0
    counts = np.zeros(1 << 16, dtype=np.int64)
    for raw in read_slices(weight, stops):
        counts += count_codes(np.frombuffer(raw, dtype=np.uint16))
        done += len(raw)
        if done % per_head == 0:
            present = counts.nonzero()[0]
            found.append(_Head(present.astype(np.uint16), counts[present]))
            counts[:] = 0
    return found


def _quality(
    heads: Sequence[_Head], table: NDArray[np.uint8], scale: np.float32, *, has_heads: bool, name: str
) -> QualityRecord:
    """The figures of a weight in which each code of `heads` became its entry in `table`, times `scale`."""
    values = bf16_values()
    # An overflow among the weight's own codes is refused by name; infinity and NaN are not among them.
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.abs(decode_table()[table] * scale - values)
    amax = [float(values[head.largest]) for head in heads]
    return record_of(
        _square_sums(heads, values),
        _square_sums(heads, errors),
        max_error=max(float(errors[head.codes].max()) for head in heads),
        amax=max(amax),
        head_amax=amax if has_heads else [],
        name=name,
    )


def _square_sums(heads: Sequence[_Head], values: NDArray[np.float32]) -> list[float]:
    # NaN codes are among them, which no head has
    with np.errstate(invalid="ignore"):
        squares = np.square(values, dtype=np.float64)
    return [float(np.dot(head.counts, squares[head.codes])) for head in heads]
