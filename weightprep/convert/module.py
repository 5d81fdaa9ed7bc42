"""Converts one module: reads its tensors, runs the recipe's store steps and measures what they cost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from weightprep.checkpoint.manifest import ModuleRecord, QualityRecord
from weightprep.checkpoint.reader import read_tensor
from weightprep.checkpoint.writer import as_bytes
from weightprep.convert.plan import ModuleJob
from weightprep.convert.quality import measure
from weightprep.convert.slices import run_in_slices
from weightprep.deferred import torch
from weightprep.transforms import Bundle
from weightprep.transforms.stored_absorbed import to_linears

__all__ = ["Converted", "convert_module", "module_record", "stored_tensors"]


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted module.

    :param tensors: role -> tensor, as the file will hold it
    """

    tensors: Mapping[str, torch.Tensor | NDArray[Any]]
    record: ModuleRecord


def convert_module(job: ModuleJob, dims: Mapping[str, int], file: str) -> Converted:
    """Convert the module of `job`.

    :param file: the file that the result goes into, for the record
    :raises CheckpointError: a value cannot be converted (NaN, infinity), or the source cannot be read
    """
    source = job.source
    weight = read_tensor(source.weight)
    scale = read_tensor(source.scale) if source.scale else None
    bundle = Bundle.source(weight, scale, source.encoded)
    stored = run_in_slices(job.plan.store, bundle, dims, source.weight.name)
    tensors = stored_tensors(job, stored)
    one_scale = stored.get("scale")
    record = module_record(
        job,
        file,
        source_sha256={ref.name: _sha256(t) for ref, t in zip(job.source_refs, bundle.values(), strict=True)},
        target_sha256={job.outputs[role].name: _sha256(tensor) for role, tensor in tensors.items()},
        scale=float(one_scale) if one_scale is not None and one_scale.numel() == 1 else None,
        quality=measure(bundle, stored, heads=job.heads(dims), name=source.weight.name),
    )
    return Converted(tensors, record)


def module_record(
    job: ModuleJob,
    file: str,
    *,
    source_sha256: Mapping[str, str],
    target_sha256: Mapping[str, str],
    scale: float | None,
    quality: QualityRecord,
) -> ModuleRecord:
    """The record of `job`, whichever way it was done; for the parameters see :class:`ModuleRecord`."""
    return ModuleRecord(
        module=job.source.module,
        layer=job.plan.layer,
        group=job.plan.group,
        file=file,
        source_encoding=job.source.encoded.encoding.value,
        target_encoding=job.target_encoding,
        source_sha256=dict(source_sha256),
        target_sha256=dict(target_sha256),
        scale=scale,
        quality=quality,
        overrides_exclude=job.overrides,
    )


def stored_tensors(job: ModuleJob, stored: Bundle) -> dict[str, torch.Tensor]:
    """The tensors of `stored` in the shapes that `job` plans: one scale is repeated where every block gets its own."""
    if stored.absorbed:
        return to_linears(stored)
    return {
        role: stored[role].expand(info.shape).contiguous() if role == "scale" else stored[role]
        for role, info in job.outputs.items()
    }


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor.contiguous())).hexdigest()
