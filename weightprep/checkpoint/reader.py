"""Finds a module's tensors and reads them by byte range: no memory map, whose pages count as ours, and no pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weightprep.checkpoint.json_file import open_regular, unreadable
from weightprep.checkpoint.repository import TensorRef
from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats.encoding import FOREIGN_SUFFIXES, SCALE_SUFFIXES, WEIGHT_SUFFIXES, EncodedShape, classify

__all__ = ["SourceModule", "find_module", "read_bytes", "read_tensor"]


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
    return torch.frombuffer(read_bytes(ref), dtype=torch.uint8).view(dtype).view(ref.shape)


def read_bytes(ref: TensorRef) -> bytearray:
    """The bytes of the tensor at `ref`.

    :raises CheckpointError: the file cannot be read or became shorter
    """
    buffer = bytearray(ref.nbytes)
    view = memoryview(buffer)
    fd = open_regular(ref.path)
    try:
        done = 0
        while done < ref.nbytes:
            got = os.preadv(fd, [view[done:]], ref.offset + done)
            if got == 0:
                raise CheckpointError(
                    ref.path,
                    found=f"the end of the file inside tensor {ref.name!r}",
                    wanted=f"{ref.nbytes} bytes at offset {ref.offset}",
                    remedy="the file changed while it was being read: leave the checkpoint alone and run again",
                )
            done += got
    except OSError as error:
        raise unreadable(ref.path, error) from None
    finally:
        os.close(fd)
    return buffer
