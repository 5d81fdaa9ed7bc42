"""The tensors of an architecture as tables: names and shapes are data, and one loop writes every model.

A shape is a row of names. A name stands for a key of config.json, or for one of the derived sizes in `sizes`, which
are the same for every MLA model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from weightprep.formats.encoding import Encoding

__all__ = ["Architecture", "Kind", "LayerKind", "Row", "Tensor", "sizes", "tensors"]


class Kind(str, Enum):
    """What a tensor is, as far as quantization schemes tell tensors apart."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    KEPT = "kept"
    NORM = "norm"
    FLOAT32 = "float32"


class LayerKind(str, Enum):
    """What a layer has: the rows of a table that apply to it."""

    ALL = "all"
    DENSE = "dense"
    SPARSE = "sparse"
    INDEXED = "indexed"
    NEXTN = "nextn"
    COMPRESSED_4 = "compressed 4"
    COMPRESSED_128 = "compressed 128"


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of a layer; a name with `{e}` stands for one of each expert.

    :param name: relative to the layer, suffix included
    :param excluded_as: the name under which published fp8 exclude lists mention it, where that is not its module name
    """

    name: str
    shape: tuple[str, ...]
    kind: Kind
    layers: LayerKind = LayerKind.ALL
    excluded_as: str | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the model to write.

    :param name: full name
    :param excluded_as: the entry that a published fp8 exclude list has for it
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    excluded_as: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    :param config: keys of the published config.json that describe the model itself, sizes of the published model
        included
    :param small: sizes of a model that runs on a CPU; heads and rank keep what the family's kernels depend on
    :param full: the published sizes of the attention
    :param layer_prefix: of a layer, with `{i}`
    :param rows: tensors of a layer
    :param top: tensors outside the layers, full names
    :param nextn_prefix: of a NextN layer, counted from 0, where it is not just the next layer
    :param extra_sizes: further sizes that rows name
    :param wrapper: config.json of a wrapper model, whose `text_config` the model's own becomes
    :param fp8_lists_kept: whether its fp8 checkpoints list the modules that they keep
    :param expert_dtypes: what its config calls the encoding of its experts, under `expert_dtype`; empty where it has no
        such key
    """

    name: str
    config: Mapping[str, object]
    small: Mapping[str, int]
    full: Mapping[str, int]
    layer_prefix: str
    rows: tuple[Row, ...]
    top: tuple[Row, ...]
    wrapper: Mapping[str, object] | None = None
    fp8_lists_kept: bool = True
    nextn_prefix: str | None = None
    extra_sizes: Mapping[str, int] = field(default_factory=dict)
    expert_dtypes: Mapping[Encoding, str] = field(default_factory=dict)


def sizes(architecture: Architecture, config: Mapping[str, object]) -> dict[str, int]:
    """Every size that a row may name: the integers of `config`, the architecture's own, and what follows from them."""
    known = {key: value for key, value in config.items() if type(value) is int} | dict(architecture.extra_sizes)
    get = known.get
    heads, nope, rope, value = (
        get(key, 0) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    known["q_rows"] = heads * (nope + rope)
    known["kv_b_rows"] = heads * (nope + value)
    known["kv_a_rows"] = get("kv_lora_rank", 0) + rope
    known["o_columns"] = heads * value
    known["index_rows"] = get("index_n_heads", 0) * get("index_head_dim", 0)
    known["two_index_dim"] = 2 * get("index_head_dim", 0)
    known["shared_rows"] = get("n_shared_experts", 0) * get("moe_intermediate_size", 0)
    known["two_hidden"] = 2 * known["hidden_size"]
    head_dim, streams = get("head_dim", 0), get("hc_mult", 0)
    known["v4_q_rows"] = heads * head_dim
    known["two_head_dim"] = 2 * head_dim
    known["o_rows"] = get("o_groups", 0) * get("o_lora_rank", 0)
    known["o_group_columns"] = heads * head_dim // get("o_groups", 1)
    # Hyper connections: weights for pre, post and the mixing matrix, from all residual streams.
    known["hc_rows"] = (2 + streams) * streams
    known["hc_columns"] = streams * known["hidden_size"]
    return known


def tensors(architecture: Architecture, config: Mapping[str, object]) -> Iterator[Tensor]:
    """Every tensor of a model with this config, top level first, then layer by layer with NextN last."""
    known = sizes(architecture, config)
    for row in architecture.top:
        yield _tensor(row, "", known)
    decoder = known["num_hidden_layers"]
    for i in range(decoder + known.get("num_nextn_predict_layers", 0)):
        has = _layer_kinds(config, known, i)
        prefix = architecture.layer_prefix.format(i=i)
        if i >= decoder and architecture.nextn_prefix is not None:
            prefix = architecture.nextn_prefix.format(i=i - decoder)
        for row in architecture.rows:
            if row.layers in has:
                for e in range(known["n_routed_experts"] if "{e}" in row.name else 1):
                    yield _tensor(row, prefix, known, e)


def _layer_kinds(config: Mapping[str, object], known: Mapping[str, int], i: int) -> set[LayerKind]:
    nextn = i >= known["num_hidden_layers"]
    sparse = nextn or i >= known.get("first_k_dense_replace", 0)
    kinds = {LayerKind.ALL, LayerKind.SPARSE if sparse else LayerKind.DENSE}
    indexers, ratios = config.get("indexer_types"), config.get("compress_ratios")
    if nextn:
        kinds.add(LayerKind.NEXTN)
    if nextn or not isinstance(indexers, list) or indexers[i] == "full":
        kinds.add(LayerKind.INDEXED)
    if not nextn and isinstance(ratios, list) and ratios[i]:
        kinds.add(LayerKind.COMPRESSED_4 if ratios[i] == 4 else LayerKind.COMPRESSED_128)
    return kinds


def _tensor(row: Row, prefix: str, known: Mapping[str, int], expert: int = 0) -> Tensor:
    name = prefix + row.name.format(e=expert)
    excluded_as = prefix + row.excluded_as if row.excluded_as else name.removesuffix(".weight")
    return Tensor(name, tuple(known[size] for size in row.shape), row.kind, excluded_as)
