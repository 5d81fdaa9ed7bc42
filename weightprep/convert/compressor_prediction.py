"""Which path the compressors of a DeepSeek-V4 checkpoint take, told from headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weightprep.checkpoint.repository import Checkpoint
from weightprep.contracts.compressor_gates import predict_compressor
from weightprep.contracts.gates import Prediction

__all__ = ["CompressorForecast", "forecast_compressors"]

_NAME = re.compile(r"(?P<module>.+?\.(?P<indexer>indexer\.)?compressor)\.(?P<role>wkv\.weight|wgate\.weight|ape)")
_TORCH = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class CompressorForecast:
    """The compressors of one kind that are stored alike, on one target.

    :param kind: name of their contract in the recipe
    :param dtypes: of wkv, wgate and ape, as torch names them
    :param hooks: what of sglang weightprep hooks for them
    """

    kind: str
    count: int
    target: str
    dtypes: Mapping[str, str]
    today: Prediction
    prepared: Prediction
    hooks: tuple[str, ...]


def forecast_compressors(checkpoint: Checkpoint, target: str, version: str) -> tuple[CompressorForecast, ...]:
    """Every compressor of `checkpoint` on `target` under sglang `version`; none in other architectures.

    :raises EngineError: an unknown target, or a version without a plugin interface
    """
    modules: dict[str, dict[str, str]] = {}
    ratios: dict[str, int] = {}
    indexers = set()
    for name, ref in checkpoint.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        module, role = match["module"], match["role"].removesuffix(".weight")
        modules.setdefault(module, {})[role] = _TORCH.get(ref.info.dtype, ref.info.dtype)
        if match["indexer"]:
            indexers.add(module)
        if role == "ape" and ref.info.shape:
            ratios[module] = ref.info.shape[0]
    alike: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for module, dtypes in modules.items():
        kind = f"{'indexer_' if module in indexers else ''}compressor_ratio_{ratios.get(module, 'unknown')}"
        key = (kind, tuple(sorted(dtypes.items())))
        alike[key] = alike.get(key, 0) + 1
    return tuple(
        CompressorForecast(kind, count, target, dict(dtypes), *predict_compressor(target, version, dict(dtypes)))
        for (kind, dtypes), count in sorted(alike.items())
    )
