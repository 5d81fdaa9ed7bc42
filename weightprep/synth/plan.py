"""Decides everything about a synthetic checkpoint before a weight exists: its config, its tensors, and which shard
gets which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightprep.checkpoint.dtypes import DTYPES
from weightprep.checkpoint.header import TensorInfo
from weightprep.errors import RecipeError
from weightprep.synth.encode import Scheme, Stored, stored_as
from weightprep.synth.layout import Architecture, Tensor, sizes, tensors
from weightprep.synth.schemes import CheckpointEncoding

__all__ = ["PlacedTensor", "make_config", "place_tensors"]

# Growing by experts first makes more of them, then larger ones, up to the published 256 of 2048.
_EXPERT_SIZES = (256, 512, 1024, 2048)
_MAX_EXPERTS = 256


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of the model and the entries that it becomes, each with the number of its shard, the weight first."""

    tensor: Tensor
    scheme: Scheme
    entries: tuple[tuple[TensorInfo, int], ...]


def make_config(
    architecture: Architecture,
    encoding: CheckpointEncoding,
    *,
    layers: int,
    full_dims: bool,
    size: int | None,
    overrides: Mapping[str, object],
) -> dict[str, object]:
    """The model's part of config.json.

    :param size: bytes that the weights reach at least, by routed experts
    :param overrides: keys that replace the architecture's
    :raises RecipeError: the architecture has no experts to grow by, or is larger than `size` without further ones
    """
    config = {**architecture.config, **architecture.small, **(architecture.full if full_dims else {})}
    config["num_hidden_layers"] = layers
    # One dense layer is enough to have both kinds.
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    if "indexer_types" in config:
        # The published rule of GLM-5.2: layers 0, 1, 2, 6, 10, ... have an indexer of their own.
        known = sizes(architecture, config)
        freq, offset = known["index_topk_freq"], known["index_skip_topk_offset"]
        config["indexer_types"] = ["shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers)]
    if "compress_ratios" in config:
        config["compress_ratios"] = [4 if i % 2 else 128 for i in range(layers)]
    experts = encoding.expert.encoding
    if experts is not None and experts in architecture.expert_dtypes:
        config["expert_dtype"] = architecture.expert_dtypes[experts]
    config.update(overrides)
    return config if size is None else _grow(architecture, encoding, config, size, overrides)


def _grow(
    architecture: Architecture,
    encoding: CheckpointEncoding,
    config: dict[str, object],
    size: int,
    overrides: Mapping[str, object],
) -> dict[str, object]:
    known = sizes(architecture, config)
    step, first = known.get("n_group", 1), known["n_routed_experts"]
    candidates = [known["moe_intermediate_size"]] if "moe_intermediate_size" in overrides else _EXPERT_SIZES
    grown = config
    least = _weight_bytes(architecture, encoding, {**config, "moe_intermediate_size": candidates[0]})
    for expert_size in candidates:
        grown = {**config, "moe_intermediate_size": expert_size}
        now = _weight_bytes(architecture, encoding, grown)
        grow_by = _weight_bytes(architecture, encoding, {**grown, "n_routed_experts": first + step}) - now
        if grow_by == 0:
            raise RecipeError(
                "synth",
                found=f"{architecture.name} with {known['num_hidden_layers']} layers, none of which has experts",
                wanted="a layer with experts to grow by",
                remedy="raise --layers",
            )
        if size < least:
            raise RecipeError(
                "synth",
                found=f"a size of {size:,} bytes",
                wanted=f"{least:,} or more: what the model takes without further experts",
                remedy="ask for more, for fewer layers, or for smaller dims (without --full-dims)",
            )
        experts = first + step * max(0, -(-(size - now) // grow_by))
        grown["n_routed_experts"] = experts
        if experts <= _MAX_EXPERTS:
            break
    return grown


def _weight_bytes(architecture: Architecture, encoding: CheckpointEncoding, config: Mapping[str, object]) -> int:
    return sum(
        _nbytes(stored)
        for tensor in tensors(architecture, config)
        for stored in stored_as(encoding.scheme(tensor.kind), tensor.shape)
    )


def _nbytes(stored: Stored) -> int:
    return math.prod(stored.shape) * DTYPES[stored.dtype].bits // 8


def place_tensors(model: Iterable[Tensor], encoding: CheckpointEncoding, shards: int) -> list[PlacedTensor]:
    """Spread the model over `shards` files of about equal size, in order; a scale goes to the shard after its
    weight's.

    :raises RecipeError: fewer tensors than files
    """
    model = list(model)
    if len(model) < shards:
        raise RecipeError(
            "synth",
            found=f"{shards} shards for {len(model)} tensors",
            wanted="at least one tensor in each shard",
            remedy=f"ask for {len(model)} shards at most, or for more layers",
        )
    stored = [stored_as(encoding.scheme(tensor.kind), tensor.shape) for tensor in model]
    total = sum(_nbytes(forms[0]) for forms in stored)
    placed = []
    done, shard = 0, -1
    for position, (tensor, forms) in enumerate(zip(model, stored, strict=True)):
        # No shard stays empty: not behind a tensor that is larger than one, nor for want of tensors at the end.
        by_size = min(done * shards // max(total, 1), shards - 1, shard + 1)
        shard = max(by_size, shards - (len(model) - position))
        done += _nbytes(forms[0])
        infos = [_info(tensor, form) for form in forms]
        entries = tuple((info, (shard + number) % shards) for number, info in enumerate(infos))
        placed.append(PlacedTensor(tensor, encoding.scheme(tensor.kind), entries))
    return placed


def _info(tensor: Tensor, form: Stored) -> TensorInfo:
    name = tensor.name.removesuffix(".weight") + form.suffix if form.suffix else tensor.name
    return TensorInfo(name, form.dtype, form.shape, 0, _nbytes(form))
