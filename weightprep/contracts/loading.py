"""What sglang itself makes of a stored kv_b_proj at load, as data: the attributes that its gates will then look at.

Read from post_load_weights (deepseek_weight_loader.py) of sglang's releases in READ_RELEASES. With the gates it tells,
from headers alone, which path a layer takes without weightprep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightprep.contracts.engine_version import engine_version_of, is_release_in

__all__ = ["LOAD_RULES", "LoadRule", "LoadedLayer", "load_layer"]

_FLOAT = frozenset({"bf16", "fp16", "fp32"})
_FP8 = frozenset({"fp8_block", "fp8_channel", "fp8_tensor"})
_CUDA = frozenset({"sm90", "sm100"})
_PLAIN = {"w_kc": "bfloat16", "w_vc": "bfloat16", "w_scale": "float"}
_E4M3FN = {"w_kc": "float8_e4m3fn", "w_vc": "float8_e4m3fn", "w_scale": "tensor"}
_E4M3FNUZ = {"w_kc": "float8_e4m3fnuz", "w_vc": "float8_e4m3fnuz", "w_scale": "tensor"}
_PACKED = {"w_kc": "uint8", "w_vc": "uint8", "w_scale": "float", "w_scale_k": "uint8", "w_scale_v": "uint8"}


@dataclass(frozen=True, slots=True)
class LoadRule:
    """One branch of the loader; None and "" match everything.

    :param attributes: what the attention module has afterwards: dtype names, "tensor" or "float" for w_scale
    """

    encodings: frozenset[str] | None
    attributes: Mapping[str, str]
    reason: str
    targets: frozenset[str] | None = None
    versions: str = ""
    architecture: str | None = None
    quant_method: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """What decides about one layer.

    :param encoding: of the stored kv_b_proj ("bf16", "fp8_block", ...)
    :param architecture: of the model that holds the layer; sglang gives the NextN layer's model another name than the
        main model's
    :param quant_method: of the checkpoint's quantization_config, None without one
    """

    encoding: str
    architecture: str
    quant_method: str | None


# First match wins.
LOAD_RULES = (
    LoadRule(frozenset({"fp8_block"}), _PLAIN, "the loader dequantizes 128x128 blocks to bf16", _CUDA),
    LoadRule(_FP8, _E4M3FNUZ, "the loader requantizes it under one scale, in this GPU's fp8", frozenset({"gfx942"})),
    LoadRule(_FP8, _E4M3FN, "the loader requantizes it under one scale"),
    LoadRule(
        _FLOAT,
        _E4M3FN,
        "the loader casts kv_b_proj to fp8 for this architecture",
        frozenset({"gfx950"}),
        ">=0.5.18",
        "GlmMoeDsaForCausalLM",
    ),
    LoadRule(
        None,
        _PACKED,
        "the loader quantizes kv_b_proj to MXFP4 for this architecture under quark",
        frozenset({"gfx950"}),
        "",
        "DeepseekV3ForCausalLM",
        "quark",
    ),
    LoadRule(frozenset({"int8_channel", "int8_block"}), _PLAIN, "the loader dequantizes int8 to bf16"),
    LoadRule(_FLOAT, _PLAIN, "the loader leaves kv_b_proj unquantized"),
    LoadRule(
        None, {"w_kc": "uint8", "w_vc": "uint8", "w_scale": "float"}, "the loader splits the packed bytes as they are"
    ),
)


def load_layer(layer: LoadedLayer, target: str, version: str) -> LoadRule:
    """The branch that sglang `version` takes for `layer` on `target`.

    :raises EngineError: a version without a plugin interface
    """
    found = engine_version_of(version)
    return next(
        rule
        for rule in LOAD_RULES
        if (rule.encodings is None or layer.encoding in rule.encodings)
        and (rule.targets is None or target in rule.targets)
        and is_release_in(rule.versions, found)
        and rule.architecture in (None, layer.architecture)
        and rule.quant_method in (None, layer.quant_method)
    )
