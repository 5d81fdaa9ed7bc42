"""A checkpoint directory as one checked object: after `Checkpoint.open`, index and headers agree in both directions.

Loaders check one direction at most, so a shard or a tensor that is missing is served as random weights without an
error. Here every tensor of the index is in the shard that it names, every tensor of a shard is in the index, and no
name is in two shards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from weightprep.checkpoint.config import CONFIG_NAME, ModelConfig, read_config
from weightprep.checkpoint.dtypes import DTYPES
from weightprep.checkpoint.header import Header, TensorInfo, read_header
from weightprep.checkpoint.hub_source import web_address
from weightprep.checkpoint.json_file import read_object
from weightprep.checkpoint.paths import check_name, walk_files
from weightprep.deferred import torch
from weightprep.errors import CheckpointError

__all__ = ["INDEX_NAME", "PICKLE_SUFFIXES", "Checkpoint", "TensorRef", "assemble", "tensor_refs"]

INDEX_NAME = "model.safetensors.index.json"
# 118,629 names of GLM-5.2-FP8 take 11 MB.
MAX_INDEX_BYTES = 256 * 2**20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where the bytes of one tensor are.

    :param shard: file name in the checkpoint directory
    :param path: real path of that file
    :param offset: absolute offset of the first byte in that file
    """

    name: str
    shard: str
    path: Path
    info: TensorInfo
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the tensor (F4: uint8).

        :raises CheckpointError: torch has none (F6)
        """
        dtype = DTYPES[self.info.dtype].torch
        if dtype is None:
            raise self._not_of_torch()
        return dtype

    @property
    def dtype_name(self) -> str:
        """The name of the torch dtype, also where that torch is too old to have it.

        :raises CheckpointError: torch has none (F6)
        """
        name = DTYPES[self.info.dtype].torch_name
        if name is None:
            raise self._not_of_torch()
        return name

    def _not_of_torch(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor {self.name!r}",
            found=f"dtype {self.info.dtype}",
            wanted="a dtype that torch can hold",
            remedy="such a tensor can be copied but not converted; leave it out of the recipe",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in torch: of an F4 tensor that of its packed bytes, last axis halved."""
        shape = self.info.shape
        return (*shape[:-1], shape[-1] // 2) if self.info.dtype == "F4" else shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.info.nbytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory whose files agree with each other.

    :param shards: file name -> header, sorted by file name
    :param tensors: name -> place, by shard and then in the order of the bytes
    :param index_path: the index file, None for a single file without one
    :param other_files: every other file, relative to `root`, sorted
    """

    root: Path
    config: ModelConfig
    shards: Mapping[str, Header]
    tensors: Mapping[str, TensorRef]
    index_path: Path | None
    other_files: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open and check the checkpoint directory at `path`; reads headers, the index and the configs only.

        :raises CheckpointError: anything in it is missing, malformed or inconsistent; nothing is ever unpickled
        """
        root = Path(path)
        if not root.is_dir():
            if (page := web_address(path)) is not None:
                raise CheckpointError(
                    path,
                    found="the address of a page",
                    wanted="a checkpoint directory, or org/name of a repository on the hub",
                    remedy=f"use {page.repo if page.revision == 'main' else page}",
                )
            raise CheckpointError(
                root,
                found="a file" if root.exists() else "nothing at this path",
                wanted="a checkpoint directory",
                remedy="pass the directory that holds config.json and the .safetensors files",
            )
        if not os.path.lexists(root / CONFIG_NAME):
            raise CheckpointError(
                root,
                found=f"a directory without {CONFIG_NAME}",
                wanted="a checkpoint directory",
                remedy="pass the directory that holds config.json and the .safetensors files",
            )
        files = walk_files(root)
        index_path = root / INDEX_NAME if Path(INDEX_NAME) in files else None
        return assemble(root, files, read_config(root), index_path, _read_headers)


def _read_headers(paths: Mapping[str, Path]) -> dict[str, Header]:
    return {name: read_header(path) for name, path in paths.items()}


def assemble(
    root: Path,
    files: Mapping[Path, Path],
    config: ModelConfig,
    index_path: Path | None,
    read_headers: Callable[[Mapping[str, Path]], Mapping[str, Header]],
) -> Checkpoint:
    """Put a checkpoint together from its files, wherever they are, and check that they agree.

    :param files: every file, relative path -> where it can be read
    :param index_path: a local copy of the index, if there is one
    :param read_headers: gets the shards as file name -> where it can be read, and returns their headers
    :raises CheckpointError: as :meth:`Checkpoint.open`
    """
    weight_map = _read_index(index_path) if index_path else None
    shards = dict(read_headers(_shard_paths(root, files, weight_map)))
    tensors = tensor_refs(shards)
    if weight_map is not None and index_path is not None:
        _check_index(weight_map, tensors, index_path)
    known = {Path(INDEX_NAME), *(Path(name) for name in shards)}
    others = tuple(relative for relative in files if relative not in known)
    return Checkpoint(root, config, MappingProxyType(shards), tensors, index_path, others)


def tensor_refs(shards: Mapping[str, Header]) -> Mapping[str, TensorRef]:
    """All tensors of `shards`.

    :raises CheckpointError: a name is in two shards
    """
    tensors: dict[str, TensorRef] = {}
    for shard, header in shards.items():
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name[:200]!r}",
                    found=f"in {tensors[name].shard} and in {shard}",
                    wanted="each tensor in one shard",
                    remedy="remove the stale shard; loaders read both and keep whichever comes last",
                )
            tensors[name] = TensorRef(name, shard, header.path, info, header.data_start + info.begin)
    return MappingProxyType(tensors)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_object(path, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(
            path,
            found="no weight_map of strings",
            wanted="weight_map: {tensor name: file name}",
            remedy="take the index from the model's repository again",
        )
    return weight_map


def _shard_paths(root: Path, files: Mapping[Path, Path], weight_map: Mapping[str, str] | None) -> dict[str, Path]:
    """File name -> real path of every shard."""
    present = {
        str(path): real for path, real in files.items() if path.suffix == ".safetensors" and len(path.parts) == 1
    }
    if weight_map is None:
        return _without_index(root, present, files)
    named = sorted(set(weight_map.values()))
    for name in named:
        check_name(name, named_by=root / INDEX_NAME)
        if name not in present:
            raise CheckpointError(
                root / name,
                found="no such .safetensors file",
                wanted=f"the shard that {INDEX_NAME} names",
                remedy="the download is incomplete: fetch the missing shard, for example with `hf download`",
            )
    # Files of another format's loader lie beside the shards in some repositories; those loaders do not read the index.
    extra = sorted(name for name in present.keys() - set(named) if not name.startswith("consolidated"))
    if extra:
        raise CheckpointError(
            root / extra[0],
            found=f"{len(extra)} .safetensors file(s) that {INDEX_NAME} does not name",
            wanted="every shard in the index",
            remedy="remove the stale file, or take the matching index from the model's repository",
        )
    return {name: present[name] for name in named}


def _without_index(root: Path, present: dict[str, Path], files: Mapping[Path, Path]) -> dict[str, Path]:
    if len(present) > 1:
        raise CheckpointError(
            root,
            found=f"{len(present)} .safetensors files and no {INDEX_NAME}",
            wanted="an index, or a single file",
            remedy="fetch the index from the model's repository: without it nobody can tell whether a shard is missing",
        )
    for name in present:
        check_name(name, named_by=root)
        numbered = _NUMBERED.search(name)
        if numbered and int(numbered[2]) > 1:
            raise CheckpointError(
                root / name,
                found=f"one shard of {int(numbered[2])} and no {INDEX_NAME}",
                wanted="all shards and their index",
                remedy="the download is incomplete: fetch the rest, for example with `hf download`",
            )
    if not present:
        pickles = [path for path in files if path.suffix in PICKLE_SUFFIXES]
        raise CheckpointError(
            root / pickles[0] if pickles else root,
            found="weights in a pickle only" if pickles else "no .safetensors file",
            wanted="safetensors weights",
            remedy="convert the weights to safetensors with a tool that you trust: a pickle runs code when it is read, "
            "so weightprep never opens one"
            if pickles
            else "pass the directory that holds the weights",
        )
    return present


def _check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorRef], index_path: Path) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].shard != shard:
            actual = f"it is in {tensors[name].shard}" if name in tensors else "no shard has it"
            raise CheckpointError(
                f"{index_path}: tensor {name[:200]!r}",
                found=f"the index says {shard}, but {actual}",
                wanted="index and shard headers that agree",
                remedy="index and shards come from different versions or a shard is damaged: download both again",
            )
    for name, ref in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"{ref.path}: tensor {name[:200]!r}",
                found="a tensor that the index does not name",
                wanted="index and shard headers that agree",
                remedy="index and shards come from different versions: download both again",
            )
