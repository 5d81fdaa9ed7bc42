"""Reads one tensor by its byte range: no memory map, whose pages the process would be charged for, and no pickle."""

from __future__ import annotations

import os

import torch

from weightprep.checkpoint.json_file import open_regular, unreadable
from weightprep.checkpoint.repository import TensorRef
from weightprep.errors import CheckpointError

__all__ = ["read_tensor"]


def read_tensor(ref: TensorRef) -> torch.Tensor:
    """The tensor at `ref`, contiguous, on the CPU, in memory of its own; F4 as its packed bytes (uint8).

    :raises CheckpointError: the file cannot be read or became shorter, or torch has no such dtype
    """
    dtype = ref.dtype
    if ref.nbytes == 0:
        return torch.empty(ref.shape, dtype=dtype)
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
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(ref.shape)
