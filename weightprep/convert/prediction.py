"""Which path each layer takes, told from headers alone: as the checkpoint is, and as weightprep prepares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightprep.checkpoint.repository import Checkpoint
from weightprep.contracts.gates import Prediction, predict
from weightprep.contracts.loading import LoadedLayer, load_layer
from weightprep.convert.planner import find_modules
from weightprep.recipe import ModelPlan, ModulePlan, gate_attributes

__all__ = ["LayerForecast", "forecast"]


@dataclass(frozen=True, slots=True)
class LayerForecast:
    """One layer on one target.

    :param encoding: how the checkpoint stores the module
    :param why_today: what sglang's loader does to it
    """

    plan: ModulePlan
    target: str
    encoding: str
    today: Prediction
    why_today: str
    prepared: Prediction


def forecast(checkpoint: Checkpoint, model: ModelPlan, target: str, version: str) -> tuple[LayerForecast, ...]:
    """Every module of `model` that the checkpoint has, on `target` under sglang `version`.

    :raises EngineError: an unknown target, or a version without a plugin interface
    """
    found, _ = find_modules(checkpoint, model)
    method = (checkpoint.config.quantization or {}).get("quant_method")
    architecture = _inner_architecture(checkpoint, model)
    forecasts = []
    for plan, source in found:
        # sglang renames the draft's architecture, so what its loader does for the main model does not happen there
        name = architecture if plan.group == "decoder" else f"{architecture}NextN"
        layer = LoadedLayer(source.encoded.encoding.value, name, method if isinstance(method, str) else None)
        rule = load_layer(layer, target, version)
        forecasts.append(
            LayerForecast(
                plan,
                target,
                layer.encoding,
                predict(target, version, rule.attributes),
                rule.reason,
                predict(target, version, gate_attributes(model, plan.contract, target)),
            )
        )
    return tuple(forecasts)


def _inner_architecture(checkpoint: Checkpoint, model: ModelPlan) -> str:
    text = checkpoint.config.raw.get("text_config")
    inner = text.get("architectures") if isinstance(text, Mapping) else None
    return str(inner[0]) if isinstance(inner, list) and inner else model.architecture
