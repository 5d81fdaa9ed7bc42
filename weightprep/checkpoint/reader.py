"""Finds a module's tensors and reads them by byte range: no memory map, whose pages count as ours, and no pickle."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weightprep.checkpoint.json_file import open_regular, unreadable
from weightprep.checkpoint.repository import TensorRef
from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats.encoding import FOREIGN_SUFFIXES, SCALE_SUFFIXES, WEIGHT_SUFFIXES, EncodedShape, classify

__all__ = ["SourceModule", "changed_while_read", "find_module", "read_slices", "read_tensor"]


@dataclass(frozen=True, slots=True)
class SourceModule:
    """One linear layer as it is stored.

    :param module: its name, without the suffix of a tensor
    :param scale: None for an unquantized weight; it may be in another shard than the weight
    """

    module: str
    encoded: EncodedShape
    weight: TensorRef
    scale: TensorRef | None


def find_module(
    tensors: Mapping[str, TensorRef], module: str, *, block_hint: tuple[int, int] | None = None
) -> SourceModule | None:
    """The stored weight and scale of `module`, whatever names they go by; None where the checkpoint has no such weight.

    :param block_hint: `weight_block_size` of the checkpoint's config
    :raises CheckpointError: two weights, two scales, a scale alone, or an encoding that cannot be dequantized
    """
    weight = _only(tensors, module, (*WEIGHT_SUFFIXES, *FOREIGN_SUFFIXES))
    scale = _only(tensors, module, SCALE_SUFFIXES)
    if weight is None:
        if scale is not None:
            raise CheckpointError(
                scale.name,
                found="a scale without a weight",
                wanted=f"{module}{WEIGHT_SUFFIXES[0]} in some shard",
                remedy="the checkpoint is incomplete: download it again",
            )
        return None
    encoded = classify(
        weight.name,
        weight.dtype_name,
        weight.shape,
        scale.dtype_name if scale else None,
        scale.shape if scale else None,
        block_hint,
    )
    return SourceModule(module, encoded, weight, scale)


def _only(tensors: Mapping[str, TensorRef], module: str, suffixes: tuple[str, ...]) -> TensorRef | None:
    found = [tensors[module + suffix] for suffix in suffixes if module + suffix in tensors]
    if len(found) > 1:
        raise CheckpointError(
            module,
            found=f"both {found[0].name} and {found[1].name}",
            wanted="one weight and at most one scale",
            remedy="the checkpoint holds two versions of this layer: remove the stale one, or download it again",
        )
    return found[0] if found else None


def read_tensor(ref: TensorRef) -> torch.Tensor:
    """The tensor at `ref`, contiguous, on the CPU, in memory of its own; F4 as its packed bytes (uint8).

    :raises CheckpointError: the file cannot be read or became shorter, or torch has no such dtype
    """
    dtype = ref.dtype
    if ref.nbytes == 0:
        return torch.empty(ref.shape, dtype=dtype)
    (raw,) = read_slices(ref, [ref.nbytes])
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(ref.shape)


def read_slices(ref: TensorRef, stops: Sequence[int]) -> Iterator[memoryview]:
    """The bytes of the tensor at `ref`, in slices that end at `stops`; a slice is overwritten by the next one.

    :param stops: offsets in the tensor, ascending
    :raises CheckpointError: the file cannot be read or became shorter
    """
    starts = [0, *stops[:-1]]
    # Pages of its own, which the system has back at once: malloc keeps what is freed, the more the larger it was.
    buffer = memoryview(mmap.mmap(-1, max(stop - start for start, stop in zip(starts, stops, strict=True))))
    fd = open_regular(ref.path)
    try:
        for start, stop in zip(starts, stops, strict=True):
            _fill(buffer[: stop - start], fd, ref, start)
            yield buffer[: stop - start]
    finally:
        os.close(fd)


def _fill(view: memoryview, fd: int, ref: TensorRef, start: int) -> None:
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], ref.offset + start + done)
        except OSError as error:
            raise unreadable(ref.path, error) from None
        if got == 0:
            raise changed_while_read(ref, f"the end of the file inside tensor {ref.name!r}")
        done += got


def changed_while_read(ref: TensorRef, found: str) -> CheckpointError:
    """The error of a file that was another one a moment ago."""
    return CheckpointError(
        ref.path,
        found=found,
        wanted=f"{ref.nbytes} bytes at offset {ref.offset}, the same each time",
        remedy="the file changed while it was being read: leave the checkpoint alone and run again",
    )
