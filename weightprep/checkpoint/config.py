"""config.json and hf_quant_config.json as data: the only two files that say what the tensors are meant to be.

A wrapper model (Kimi K2.5, K2.6) keeps the language model's settings, the quantization_config included, under
`text_config`; older compressed-tensors checkpoints call it `compression_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from weightprep.checkpoint.json_file import read_object
from weightprep.errors import CheckpointError

__all__ = [
    "CONFIG_NAME",
    "HF_QUANT_CONFIG_NAME",
    "ModelConfig",
    "find_quantization",
    "read_config",
    "read_config_files",
]

CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"

# An expanded exclude list of a 1.5 TB model takes about 100 kB.
MAX_CONFIG_BYTES = 64 * 2**20

# sglang takes the first of these that is not null (model_loader/checkpoint_quantization.py).
_QUANTIZATION = (("quantization_config",), ("text_config", "quantization_config"), ("compression_config",))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a checkpoint.

    :param raw: all of config.json, key order kept
    :param architectures: its `architectures`, empty where it has none
    :param quantization: its quantization_config, wherever :func:`find_quantization` finds it
    :param hf_quant_config: all of hf_quant_config.json (modelopt writes its exclude list there), None without one
    """

    raw: Mapping[str, object]
    architectures: tuple[str, ...]
    quantization: Mapping[str, object] | None
    hf_quant_config: Mapping[str, object] | None

    @property
    def weight_block_size(self) -> tuple[int, int] | None:
        """Rows and columns of an fp8 scale block, None where the config names none that can be one."""
        block = (self.quantization or {}).get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            return None
        return block[0], block[1]


def find_quantization(raw: Mapping[str, object]) -> tuple[str, object]:
    """The dotted key of config.json under which the quantization of the model stands, and what stands there.

    The object is the one in `raw`, not a copy. Where there is none: `quantization_config` and None. An empty object
    says nothing, and hides those after it from sglang, which then refuses the checkpoint: its key and None.
    """
    for path in _QUANTIZATION:
        value: object = raw
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return ".".join(path), value if value != {} else None
    return "quantization_config", None


def read_config(root: Path) -> ModelConfig:
    """Read the configuration of the checkpoint directory `root`.

    :raises CheckpointError: config.json is missing, or either file is malformed
    """
    hf_quant_config = root / HF_QUANT_CONFIG_NAME
    return read_config_files(root / CONFIG_NAME, hf_quant_config if hf_quant_config.exists() else None)


def read_config_files(path: Path, hf_quant_config_path: Path | None) -> ModelConfig:
    """Read a configuration from config.json at `path` and hf_quant_config.json where there is one.

    :raises CheckpointError: a file cannot be read, or a field that this package uses has another type
    """
    raw = read_object(path, max_bytes=MAX_CONFIG_BYTES)
    hf_quant_config = read_object(hf_quant_config_path, max_bytes=MAX_CONFIG_BYTES) if hf_quant_config_path else None
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise _wrong_type(path, "architectures", architectures, "a list of strings")
    text = raw.get("text_config") or {}
    if not isinstance(text, dict):
        raise _wrong_type(path, "text_config", text, "an object")
    key, quantization = find_quantization(raw)
    if not isinstance(quantization, dict | None):
        raise _wrong_type(path, key, quantization, "an object")
    return ModelConfig(MappingProxyType(raw), tuple(architectures), quantization, hf_quant_config)


def _wrong_type(path: Path, key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {key}",
        found=f"a JSON {type(value).__name__}",
        wanted=wanted,
        remedy="take the file from the model's repository again, or repair it by hand",
    )
