"""Writes one shard without ever holding it: the header, then byte ranges of source files and single tensors.

The layout is fixed before the first byte is written, so the bytes of a shard depend on its tensors alone, not on the
order or the way in which they arrive. A shard is finished only when every tensor has been written once and the file
is on the disk.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightprep.checkpoint.copying import CopyMethod, copy_range
from weightprep.checkpoint.dtypes import DTYPES, name_of
from weightprep.checkpoint.header import TensorInfo, encode_header, place
from weightprep.checkpoint.json_file import open_regular, unreadable
from weightprep.checkpoint.repository import TensorRef
from weightprep.deferred import torch
from weightprep.errors import CheckpointError

__all__ = ["ShardWriter", "as_bytes", "describe", "fsync_directory"]

_Run = tuple[list[TensorRef], int, int]


def describe(name: str, dtype: torch.dtype | str, shape: Sequence[int], *, as_dtype: str | None = None) -> TensorInfo:
    """The header entry of a tensor that is going to be written, its offsets from 0.

    :param dtype: a torch dtype, or its name without "torch."
    :param as_dtype: the safetensors dtype where torch's does not tell (F4 and F8_E8M0 held as uint8); F4 takes the
        packed shape
    """
    element = DTYPES[as_dtype or name_of(dtype)]
    # F4 comes packed: two elements in each byte of `shape`
    nbytes = math.prod(shape) * max(element.bits, 8) // 8
    logical = (*shape[:-1], shape[-1] * 2) if element.name == "F4" else tuple(shape)
    return TensorInfo(name, element.name, logical, 0, nbytes)


def as_bytes(tensor: torch.Tensor | NDArray[Any]) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place: the view is valid only as long as the tensor is."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(np.uint8).data
    # Not through numpy: it has no bfloat16.
    raw = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename survives a power cut only after this."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ShardWriter:
    """One shard being written; a context manager that closes the file, but only :meth:`finish` makes it complete.

    One thread copies; others may write other tensors meanwhile.

    :param path: must not exist yet
    :param infos: the tensors in the order in which they should lie in the file; their offsets are assigned here
    :param metadata: the header's string map
    :param methods: how byte ranges may be copied, best first
    :param on_bytes: called with every number of bytes that reached the file
    :raises CheckpointError: the file cannot be created, or two tensors have one name
    """

    def __init__(
        self,
        path: Path,
        infos: Iterable[TensorInfo],
        metadata: Mapping[str, str],
        *,
        methods: Sequence[CopyMethod] = tuple(CopyMethod),
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        placed = place(infos)
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({info.name: info for info in placed})
        if len(self.tensors) != len(placed):
            raise self._refuse("two tensors of one name", "each name once")
        self._methods = methods
        self._on_bytes = on_bytes
        self._missing = set(self.tensors)
        header = encode_header(placed, metadata)
        self._data_start = len(header)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unreadable(path, error) from None
        try:
            self._pwrite(memoryview(header), 0)
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file as it is; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def copy(self, refs: Iterable[TensorRef]) -> None:
        """Copy tensors byte for byte from their source files; neighbours that stay neighbours go in one range.

        :raises CheckpointError: a tensor is not one of this shard's, has another dtype or shape, or its source cannot
            be read
        """
        for run, source_offset, nbytes in self._runs(refs):
            first = run[0]
            source = open_regular(first.path)
            try:
                copy_range(
                    source,
                    self._fd,
                    source_offset=source_offset,
                    target_offset=self._data_start + self.tensors[first.name].begin,
                    nbytes=nbytes,
                    methods=self._methods,
                    on_bytes=self._on_bytes,
                )
            except OSError as error:
                raise self._failed(error) from error
            except EOFError as error:
                raise CheckpointError(
                    first.path,
                    found=str(error),
                    wanted=f"{nbytes} bytes at offset {source_offset}",
                    remedy="the file changed while it was being read: leave the checkpoint alone and run again",
                ) from None
            finally:
                os.close(source)
            self._missing.difference_update(ref.name for ref in run)

    def write(self, name: str, tensor: torch.Tensor | NDArray[Any]) -> None:
        """Write the bytes of `tensor` in row-major order as the tensor `name`.

        :raises CheckpointError: `name` is not one of this shard's, was written before, or has another number of bytes
        """
        info = self._claim(name)
        if tensor.nbytes != info.nbytes:
            raise self._refuse(f"{tuple(tensor.shape)} of {tensor.dtype} for {name!r}", f"{info.dtype} of {info.shape}")
        if info.nbytes:
            data = tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().contiguous()
            self._pwrite(as_bytes(data), self._data_start + info.begin)
            if self._on_bytes is not None:
                self._on_bytes(info.nbytes)
        self._missing.discard(name)

    def write_slices(self, name: str, slices: Iterable[NDArray[np.uint8]]) -> None:
        """Write the tensor `name` as consecutive bytes, none of which is kept.

        :raises CheckpointError: `name` is not one of this shard's, was written before, or has another number of bytes
        """
        info = self._claim(name)
        done = 0
        for part in slices:
            if done + part.nbytes > info.nbytes:
                raise self._refuse(f"more than {info.nbytes} bytes for {name!r}", f"{info.dtype} of {info.shape}")
            self._pwrite(part.data, self._data_start + info.begin + done)
            done += part.nbytes
            if self._on_bytes is not None:
                self._on_bytes(part.nbytes)
        if done != info.nbytes:
            raise self._refuse(f"{done} bytes for {name!r}", f"{info.dtype} of {info.shape}")
        self._missing.discard(name)

    def finish(self) -> None:
        """Flush the shard to the disk and close it.

        :raises CheckpointError: a tensor was never written
        """
        if self._missing:
            raise self._refuse(
                f"{len(self._missing)} tensor(s) not written, {min(self._missing)!r} first", "all of them"
            )
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        self.close()

    def _runs(self, refs: Iterable[TensorRef]) -> Iterable[_Run]:
        run: list[TensorRef] = []
        start = nbytes = 0
        for ref in refs:
            info = self._claim(ref.name)
            if (info.dtype, info.shape, info.nbytes) != (ref.info.dtype, ref.info.shape, ref.nbytes):
                raise self._refuse(
                    f"{ref.info.dtype} of {ref.info.shape} to copy as {ref.name!r}", f"{info.dtype} of {info.shape}"
                )
            joins = (
                run
                and ref.path == run[-1].path
                and ref.offset == start + nbytes
                and info.begin == self.tensors[run[-1].name].end
            )
            if not joins:
                if run:
                    yield run, start, nbytes
                run, start, nbytes = [], ref.offset, 0
            run.append(ref)
            nbytes += ref.nbytes
        if run:
            yield run, start, nbytes

    def _claim(self, name: str) -> TensorInfo:
        if name not in self._missing:
            known = "written twice" if name in self.tensors else "not planned for this shard"
            raise self._refuse(f"tensor {name!r} {known}", "each planned tensor once")
        return self.tensors[name]

    def _pwrite(self, data: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            self.path,
            found=error.strerror or type(error).__name__,
            wanted="a shard written to the disk",
            remedy="check the disk and its free space, then run the command again",
        )

    def _refuse(self, found: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            self.path, found=found, wanted=wanted, remedy="please report this as a bug of weightprep, with the command"
        )
