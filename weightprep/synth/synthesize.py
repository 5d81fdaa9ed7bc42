"""Writes a small checkpoint that is shaped like a published one, so that everything can be tried without a 1.5 TB
download.

Streams: all shards are open at once and each tensor is written where the layout puts it, so a checkpoint of any size
takes the memory of its largest tensor. A weight and its scale go into different shards on purpose: published
checkpoints do that too, and a reader that looks into one file at a time must not pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from weightprep.checkpoint.config import CONFIG_NAME
from weightprep.checkpoint.repository import INDEX_NAME
from weightprep.checkpoint.writer import ShardWriter
from weightprep.errors import CheckpointError, RecipeError
from weightprep.synth.architectures import ARCHITECTURES
from weightprep.synth.encode import Scheme, encode
from weightprep.synth.layout import Architecture, Kind, Tensor, tensors
from weightprep.synth.plan import PlacedTensor, make_config, place_tensors
from weightprep.synth.schemes import ENCODINGS, quantization_config

__all__ = ["synthesize"]

_STD = 0.02
# Experts above this many elements are rotations of one random expert: they are there for their bytes.
_UNIQUE_ELEMENTS = 2**19

_Experts = dict[tuple[Scheme, tuple[int, ...]], tuple[torch.Tensor, ...]]
_Entry = TypeVar("_Entry")


def synthesize(
    dst: str | Path,
    arch: str = "glm_moe_dsa",
    *,
    layers: int = 3,
    shards: int = 3,
    encoding: str = "bf16",
    full_dims: bool = False,
    size: int | None = None,
    seed: int = 0,
    overrides: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint with random weights into the new or empty directory `dst` and return that directory.

    The same arguments give the same bytes. Weights are normal with standard deviation 0.02, norms are near 1.

    :param arch: a key of :data:`weightprep.synth.architectures.ARCHITECTURES`
    :param layers: decoder layers; the NextN layers of the architecture come on top
    :param shards: 1 writes model.safetensors without an index
    :param encoding: a key of :data:`weightprep.synth.schemes.ENCODINGS`
    :param full_dims: the published sizes of the attention, instead of ones that a CPU runs in no time
    :param size: bytes of weights to reach at least, by adding routed experts
    :param overrides: config keys that replace the architecture's, sizes included
    :raises RecipeError: unknown `arch` or `encoding`, or impossible numbers
    :raises CheckpointError: `dst` has files in it or cannot be written
    """
    architecture = _known(ARCHITECTURES, arch, "architecture")
    stored = _known(ENCODINGS, encoding, "encoding")
    if layers < 1 or shards < 1:
        raise RecipeError(
            "synth",
            found=f"{layers} layers in {shards} shards",
            wanted="at least one of each",
            remedy="raise the number",
        )
    config = make_config(architecture, stored, layers=layers, full_dims=full_dims, size=size, overrides=overrides or {})
    model = list(tensors(architecture, config))
    placed = place_tensors(model, stored, shards)
    root = Path(dst)
    _prepare(root)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    _write_shards(root, placed, names, seed)
    if shards > 1:
        _write_json(root / INDEX_NAME, _index(placed, names))
    _write_json(root / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True})
    (root / "README.md").write_text(f"# {arch}, {encoding}\n\nRandom weights written by `weightprep synth`.\n")
    # Last, so that an interrupted run leaves nothing that opens as a checkpoint.
    _write_json(root / CONFIG_NAME, _document(architecture, config, quantization_config(stored, architecture, model)))
    return root


def _known(table: Mapping[str, _Entry], name: str, what: str) -> _Entry:
    if name not in table:
        raise RecipeError(
            "synth", found=f"{what} {name!r}", wanted=f"one of {', '.join(table)}", remedy="choose one of these names"
        )
    return table[name]


def _prepare(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        empty = not any(root.iterdir())
    except OSError as error:
        raise CheckpointError(
            root, found=str(error.strerror), wanted="a directory to write to", remedy="choose another destination"
        ) from None
    if not empty:
        raise CheckpointError(
            root, found="files in it", wanted="a new or empty directory", remedy="remove them, or choose another one"
        )


def _write_shards(root: Path, placed: Sequence[PlacedTensor], names: Sequence[str], seed: int) -> None:
    experts: _Experts = {}
    with contextlib.ExitStack() as stack:
        writers = []
        for number, name in enumerate(names):
            infos = [info for tensor in placed for info, shard in tensor.entries if shard == number]
            writers.append(stack.enter_context(ShardWriter(root / name, infos, {"format": "pt"})))
        for tensor in placed:
            values = _values(tensor.tensor, tensor.scheme, seed, experts)
            for (info, shard), value in zip(tensor.entries, values, strict=True):
                writers[shard].write(info.name, value)
        for writer in writers:
            writer.finish()


def _values(tensor: Tensor, scheme: Scheme, seed: int, experts: _Experts) -> tuple[torch.Tensor, ...]:
    """What is stored of one tensor; `experts` keeps the one random expert of each shape."""
    number = int.from_bytes(hashlib.blake2b(f"{seed}:{tensor.name}".encode(), digest_size=7).digest(), "little")
    elements = math.prod(tensor.shape)
    if tensor.kind is not Kind.EXPERT or elements <= _UNIQUE_ELEMENTS:
        return encode(_random(tensor, number), scheme)
    key = (scheme, tensor.shape)
    if key not in experts:
        experts[key] = encode(_random(tensor, seed), scheme)
    weight, *rest = experts[key]
    rotated = torch.roll(weight.view(torch.uint8).reshape(-1), number % elements * weight.element_size())
    return rotated, *rest


def _random(tensor: Tensor, seed: int) -> torch.Tensor:
    normal = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    if tensor.kind is Kind.NORM:
        return normal.mul_(0.1) if tensor.name.endswith(".bias") else normal.mul_(0.1).add_(1)
    return normal.mul_(_STD)


def _index(placed: Sequence[PlacedTensor], names: Sequence[str]) -> dict[str, object]:
    entries = [entry for tensor in placed for entry in tensor.entries]
    weight_map = {info.name: names[shard] for info, shard in entries}
    return {
        "metadata": {"total_size": sum(info.nbytes for info, _ in entries)},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _document(
    architecture: Architecture, config: Mapping[str, object], quantization: Mapping[str, object] | None
) -> dict[str, object]:
    own = dict(config) if quantization is None else {**config, "quantization_config": quantization}
    return own if architecture.wrapper is None else {**architecture.wrapper, "text_config": own}


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
