"""Converts a bf16 weight to fp8 under one scale, the commonest conversion, without torch.

Two passes over the weight: the first counts its codes, and from the counts follow the amax, the table of the 65,536
possible results and every figure of quality; the second looks the results up. :func:`weightprep.convert.module.
convert_module` gives the same bytes and the same record by the recipe's steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightprep.checkpoint.manifest import ModuleRecord, QualityRecord
from weightprep.checkpoint.reader import read_bytes
from weightprep.checkpoint.writer import as_bytes
from weightprep.convert.module import Converted
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

__all__ = ["convert_by_table", "has_table"]

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80


def has_table(job: ModuleJob) -> bool:
    """Whether `job` is the conversion that this module does."""
    steps = [step for step in job.plan.store if step.transform is not dequantize]
    return (
        job.source.encoded.encoding is Encoding.BF16
        and [step.transform for step in steps] == [quantize_fp8]
        and steps[0].params["granularity"] == "tensor"
    )


def convert_by_table(job: ModuleJob, dims: Mapping[str, int], file: str) -> Converted:
    """What `convert_module` makes of a job for which `has_table` says yes.

    :param file: the file that the result goes into, for the record
    :raises CheckpointError: a value cannot be converted (NaN, infinity), or the source cannot be read
    """
    source = job.source
    raw = read_bytes(source.weight)
    codes: NDArray[np.uint16] = np.frombuffer(raw, dtype=np.uint16)
    counts = count_codes(codes)
    present = counts.nonzero()[0]
    largest = int((present & _MAGNITUDE).max())
    if largest >= _INFINITY:
        raise not_finite(source.weight.name)
    m, scale = multiplier(bf16_values()[largest])
    table = encode_table(m)
    weight = look_up_codes(table, codes)
    tensors: dict[str, NDArray[Any]] = {"weight": weight, "scale": np.full(job.outputs["scale"].shape, scale)}
    record = ModuleRecord(
        module=source.module,
        layer=job.plan.layer,
        group=job.plan.group,
        file=file,
        source_encoding=source.encoded.encoding.value,
        target_encoding=job.target_encoding,
        source_sha256={source.weight.name: hashlib.sha256(raw).hexdigest()},
        target_sha256={
            job.outputs[role].name: hashlib.sha256(as_bytes(data)).hexdigest() for role, data in tensors.items()
        },
        scale=float(scale),
        quality=_quality(
            counts[present],
            bf16_values()[present],
            decode_table()[table[present]],
            scale,
            head_amax=_head_amax(codes, source.encoded.rows, dims.get("heads")),
            name=source.weight.name,
        ),
        overrides_exclude=job.overrides,
    )
    return Converted(tensors, record)


def _quality(
    counts: NDArray[np.int64],
    values: NDArray[np.float32],
    quantized: NDArray[np.float32],
    scale: np.float32,
    *,
    head_amax: list[float],
    name: str,
) -> QualityRecord:
    """The figures of a weight in which each of `values` stands `counts` times and became `quantized` * `scale`."""
    # An overflow is refused by name.
    with np.errstate(over="ignore"):
        errors = np.abs(quantized * scale - values)
    return record_of(
        _weighted_square_sum(counts, values),
        _weighted_square_sum(counts, errors),
        max_error=float(errors.max()),
        amax=float(np.abs(values).max()),
        head_amax=head_amax,
        name=name,
    )


def _weighted_square_sum(counts: NDArray[np.int64], values: NDArray[np.float32]) -> float:
    wide = values.astype(np.float64)
    return float(np.dot(counts, wide * wide))


def _head_amax(codes: NDArray[np.uint16], rows: int, heads: int | None) -> list[float]:
    """Magnitudes of bf16 are ordered as their codes are."""
    if not heads or rows % heads:
        return []
    largest = [int((head & _MAGNITUDE).max()) for head in codes.reshape(heads, -1)]
    return [float(value) for value in bf16_values()[largest]]
