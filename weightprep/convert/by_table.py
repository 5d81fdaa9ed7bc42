"""Converts a bf16 weight to fp8 under one scale, the commonest conversion, without torch and a slice at a time.

Two passes over the weight: the first finds the amax, from which the table of the 65,536 possible results follows; the
second looks the results up and counts the codes of each head, from which every figure of quality follows.
:func:`weightprep.convert.module.convert_module` gives the same bytes and the same record by the recipe's steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

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
    decode_table,
    encode_table,
    look_up_and_count,
    multiplier,
)
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.quantize_fp8 import not_finite, quantize_fp8

__all__ = ["WriteSlices", "convert_by_table", "has_table"]

# Takes a tensor's name and its bytes in order; see ShardWriter.write_slices.
WriteSlices = Callable[[str, Iterable[NDArray[np.uint8]]], None]

_SIGN = 0x8000
_INFINITY = 0x7F80
# Small beside a weight, so that both what is read and its indices of 64 bits stay in a core's caches; large enough that
# the calls cost nothing. A head of GLM-5.2 fits.
_SLICE_BYTES = 2**19


class _Figures:
    """The figures of quality of a weight, from how often each magnitude stands in each of its heads.

    :param values: of every bf16 code
    :param table: the result of every bf16 code
    :param largest: the code of the weight's amax
    """

    def __init__(self, values: NDArray[np.float32], table: NDArray[np.uint8], scale: np.float32, largest: int) -> None:
        # Sign and error of a number are symmetrical, so those of the codes without a sign tell all.
        self._values = values[: largest + 1]
        # An overflow among the weight's own codes is refused by name.
        with np.errstate(over="ignore", invalid="ignore"):
            self._errors = np.abs(decode_table()[table[: largest + 1]] * scale - self._values)
        self._squares = np.square(np.stack([self._values, self._errors]), dtype=np.float64)
        self._present = np.zeros(largest + 1, dtype=np.bool_)
        self._sums: list[tuple[float, float]] = []
        self._amax: list[float] = []

    def add(self, counts: NDArray[np.int64]) -> None:
        """The next head has the magnitude of code i `counts[i]` times."""
        present = counts > 0
        self._present |= present
        # not by a product of matrices, for which numpy's library may start threads
        signal, noise = (self._squares * counts).sum(axis=1)
        self._sums.append((float(signal), float(noise)))
        # magnitudes of bf16 are ordered as their codes are
        self._amax.append(float(self._values[len(counts) - 1 - int(present[::-1].argmax())]))

    @property
    def complete(self) -> bool:
        """Whether the amax has been added."""
        return bool(self._present[-1])

    def record(self, *, has_heads: bool, name: str) -> QualityRecord:
        """The figures of all that was added; see `record_of`."""
        return record_of(
            [signal for signal, _ in self._sums],
            [noise for _, noise in self._sums],
            max_error=float(self._errors[self._present].max()),
            amax=max(self._amax),
            head_amax=self._amax if has_heads else [],
            name=name,
        )


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
    largest = _largest(source)
    if largest >= _INFINITY:
        raise not_finite(source.name)
    values = bf16_values()
    m, scale = multiplier(values[largest])
    table = encode_table(m)
    figures = _Figures(values, table, scale, largest)
    source_hash, target_hash = hashlib.sha256(), hashlib.sha256()

    def converted() -> Iterator[NDArray[np.uint8]]:
        per_head = source.nbytes // (heads or 1)
        counts = np.zeros(largest + 1, dtype=np.int64)
        done = 0
        for raw in read_slices(source, list(_head_stops(source.nbytes, per_head))):
            source_hash.update(raw)
            codes: NDArray[np.uint16] = np.frombuffer(raw, dtype=np.uint16)
            found, signed = look_up_and_count(table, codes)
            counts += signed[: largest + 1]
            counts += signed[_SIGN : _SIGN + largest + 1]
            target_hash.update(found.data)
            done += len(raw)
            if done % per_head == 0:
                if counts.sum() != per_head // codes.itemsize:
                    raise changed_while_read(source, f"larger numbers in {source.name!r} than a moment before")
                figures.add(counts)
                counts[:] = 0
            yield found

    scales = as_bytes(np.full(job.outputs["scale"].shape, scale))
    write(job.outputs["weight"].name, converted())
    if not figures.complete:
        raise changed_while_read(source, f"smaller numbers in {source.name!r} than a moment before")
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
        quality=figures.record(has_heads=heads is not None, name=source.name),
    )


def _stops(nbytes: int, step: int) -> list[int]:
    return [*range(step, nbytes, step), nbytes]


def _head_stops(nbytes: int, per_head: int) -> Iterator[int]:
    for start in range(0, nbytes, per_head):
        yield from (start + stop for stop in _stops(per_head, _SLICE_BYTES))


def _largest(weight: TensorRef) -> int:
    """The code of the weight's amax."""
    largest = 0
    for raw in read_slices(weight, _stops(weight.nbytes, _SLICE_BYTES)):
        codes: NDArray[np.uint16] = np.frombuffer(raw, dtype=np.uint16)
        # The last code of all is the greatest magnitude with a sign, and as signed integers the one without.
        last = int(codes.max())
        largest = max(largest, last - _SIGN if last >= _SIGN else 0, int(codes.view(np.int16).max()))
    return largest
