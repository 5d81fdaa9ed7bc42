"""What each `--encoding` stores where, and the quantization_config that a published checkpoint of that kind has.

Published checkpoints mix: only experts are MXFP4 in some, attention is per-channel fp8 beside them in others. So an
encoding here is a scheme for each kind of tensor, and the config is derived from what was really kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weightprep.formats.encoding import Encoding
from weightprep.synth.encode import BLOCK, Scheme
from weightprep.synth.layout import Architecture, Kind, Tensor

__all__ = ["ENCODINGS", "CheckpointEncoding", "quantization_config"]

_BF16 = Scheme(Encoding.BF16)
_MXFP4 = Scheme(Encoding.MXFP4, scale_dtype="U8")
_CHANNEL = Scheme(Encoding.FP8_CHANNEL)
_V4_BLOCK = Scheme(Encoding.FP8_BLOCK, ".scale", scale_dtype="F8_E8M0", power_of_two=True)
_V4_EXPERT = Scheme(Encoding.MXFP4, ".scale", scale_dtype="F8_E8M0", packed_dtype="I8")


@dataclass(frozen=True, slots=True)
class CheckpointEncoding:
    """How a whole checkpoint is stored.

    :param method: `quant_method` of its config, None for an unquantized one
    :param attention: scheme of the projections of attention and indexer
    :param mlp: scheme of dense MLPs and shared experts
    :param expert: scheme of routed experts
    """

    name: str
    method: str | None
    attention: Scheme
    mlp: Scheme
    expert: Scheme

    def scheme(self, kind: Kind) -> Scheme:
        """The scheme for tensors of this kind."""
        if kind is Kind.FLOAT32:
            return Scheme(Encoding.FP32)
        quantized = {Kind.ATTENTION: self.attention, Kind.MLP: self.mlp, Kind.EXPERT: self.expert}
        return quantized.get(kind, self.attention if self.method is None else _BF16)


def _uniform(name: str, method: str | None, scheme: Scheme) -> CheckpointEncoding:
    return CheckpointEncoding(name, method, scheme, scheme, scheme)


ENCODINGS: Mapping[str, CheckpointEncoding] = MappingProxyType(
    {
        encoding.name: encoding
        for encoding in (
            _uniform("bf16", None, _BF16),
            _uniform("fp16", None, Scheme(Encoding.FP16)),
            _uniform("fp32", None, Scheme(Encoding.FP32)),
            _uniform("fp8_block", "fp8", Scheme(Encoding.FP8_BLOCK, ".weight_scale_inv")),
            # DeepSeek-V3.1: powers of two, but stored as float32.
            _uniform("fp8_block_ue8m0", "fp8", Scheme(Encoding.FP8_BLOCK, ".weight_scale_inv", power_of_two=True)),
            _uniform(
                "fp8_block_e8m0",
                "fp8",
                Scheme(Encoding.FP8_BLOCK, ".weight_scale_inv", scale_dtype="F8_E8M0", power_of_two=True),
            ),
            # Quark's file-to-file export renames the block scales.
            CheckpointEncoding("fp8_block_quark", "quark", Scheme(Encoding.FP8_BLOCK), _MXFP4, _MXFP4),
            _uniform("fp8_channel", "quark", _CHANNEL),
            _uniform("fp8_tensor", "quark", Scheme(Encoding.FP8_TENSOR)),
            _uniform("mxfp4", "quark", _MXFP4),
            CheckpointEncoding("mxfp4_experts", "quark", _BF16, _BF16, _MXFP4),
            CheckpointEncoding("mxfp4_attn_fp8", "quark", _CHANNEL, _MXFP4, _MXFP4),
            # DeepSeek-V4.
            CheckpointEncoding("fp8_block_fp4_experts", "fp8", _V4_BLOCK, _V4_BLOCK, _V4_EXPERT),
            # Kimi K2.5: only experts are quantized, in a scheme that can be recognised but not read.
            CheckpointEncoding("int4_experts", "compressed-tensors", _BF16, _BF16, Scheme(None)),
            _uniform("int8_channel", "w8a8_int8", Scheme(Encoding.INT8_CHANNEL)),
            _uniform("int8_block", "blockwise_int8", Scheme(Encoding.INT8_BLOCK, ".weight_scale_inv")),
        )
    }
)

# Dense MLPs and shared experts, and nothing of routed experts.
_MLP_PATTERNS = ("*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj", "*shared_experts*")
# As Kimi K2.5 publishes it.
_KIMI_IGNORE = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)

_QUARK_WEIGHTS: Mapping[Encoding, Mapping[str, object]] = MappingProxyType(
    {
        Encoding.MXFP4: {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "ch_axis": -1,
            "scale_format": "e8m0",
            "scale_type": "float",
            "round_method": "half_even",
            "scale_calculation_mode": "even",
            "observer_cls": "PerBlockMXObserver",
            "is_dynamic": False,
            "symmetric": None,
        },
        Encoding.FP8_CHANNEL: {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False},
        Encoding.FP8_TENSOR: {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
        Encoding.FP8_BLOCK: {
            "dtype": "fp8_e4m3",
            "qscheme": "per_block",
            "block_size": [BLOCK, BLOCK],
            "is_dynamic": False,
        },
    }
)


def quantization_config(
    encoding: CheckpointEncoding, architecture: Architecture, tensors: Iterable[Tensor]
) -> dict[str, object] | None:
    """The quantization_config of config.json for a model with these tensors; None where nothing is quantized."""
    if encoding.method is None:
        return None
    kept = [t for t in tensors if encoding.scheme(t.kind).encoding in (Encoding.BF16, Encoding.FP32)]
    if encoding.method == "fp8":
        made: dict[str, object] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
        if encoding.attention.power_of_two:
            made["scale_fmt"] = "ue8m0"
        if architecture.fp8_lists_kept:
            made["modules_to_not_convert"] = [tensor.excluded_as for tensor in kept]
        return made
    linears = [t.name.removesuffix(".weight") for t in kept if t.kind not in (Kind.NORM, Kind.FLOAT32)]
    if encoding.method == "quark":
        return _quark(encoding, linears)
    if encoding.method == "compressed-tensors":
        return _compressed_tensors()
    block = {"weight_block_size": [BLOCK, BLOCK]} if encoding.attention.encoding is Encoding.INT8_BLOCK else {}
    return {"quant_method": encoding.method, "activation_scheme": "dynamic", **block, "ignore": linears}


def _quark(encoding: CheckpointEncoding, exclude: list[str]) -> dict[str, object]:
    patterns = (("*self_attn*", encoding.attention), *((name, encoding.mlp) for name in _MLP_PATTERNS))
    layers = {name: _quark_scheme(scheme) for name, scheme in patterns if scheme not in (encoding.expert, _BF16)}
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": _quark_scheme(encoding.expert),
        "layer_quant_config": layers,
        "layer_type_quant_config": {},
        "exclude": exclude,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "softmax_quant_spec": None,
        "algo_config": None,
    }


def _quark_scheme(scheme: Scheme) -> dict[str, object]:
    weight = {} if scheme.encoding is None else dict(_QUARK_WEIGHTS[scheme.encoding])
    return {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}, "output_tensors": None, "bias": None}


def _compressed_tensors() -> dict[str, object]:
    weights: dict[str, object] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": list(_KIMI_IGNORE),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
