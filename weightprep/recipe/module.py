"""The part of a recipe that names one kind of weight, the layers in which it stands, and its pipeline for each
precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from weightprep.recipe.base import RecipePart
from weightprep.recipe.pipeline import PipelinePart

__all__ = ["LayerPart", "ModulePart", "Precision"]

_PLACEHOLDER = re.compile(r"\{(\w*)\}")
# "bf16+fp8" is w_kc in bf16 with w_vc in fp8
Precision = Literal["fp8", "mxfp4", "bf16", "bf16+fp8"]


class LayerPart(RecipePart):
    """A run of layers that are named alike in the checkpoint."""

    prefix: str = Field(description="name of layer {i} in the checkpoint, for example model.layers.{i}")
    first: str | int = Field(description="expression over config keys: index of the first layer")
    count: str | int = Field(description="expression over config keys: number of layers")
    only: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict,
        max_length=1,
        description="key of a list in config.json with one kind for each layer, and the kinds that are of this group; "
        "without that key in config.json all layers are",
    )
    optional: bool = Field(
        default=False,
        description="whether a checkpoint, and config.json (absent keys are then 0), may leave these layers out",
    )

    @model_validator(mode="after")
    def _names_each_layer(self) -> LayerPart:
        if self.prefix.count("{i}") != 1 or self.prefix.replace("{i}", "").count("{"):
            raise ValueError("prefix must contain {i} once and no other placeholder")
        return self


class ModulePart(PipelinePart):
    """One kind of weight, and what is done to it.

    The keys of a pipeline (`store`, `load`, `passes`, `ensures`, `quality`) belong to `precision`, the default;
    `alternatives` holds the pipelines of other precisions that may be asked for by name.
    """

    source: str = Field(description="name of the module without .weight, with {prefix} for the layer's name")
    each: Mapping[str, str | int] = Field(
        default_factory=dict, description="further placeholders of source and how many values each takes, from 0"
    )
    on: tuple[str, ...] = Field(min_length=1, description="groups of layers with this module, names under `layers`")
    precision: Precision = Field(default="fp8", description="the precision of the pipeline given here")
    alternatives: Mapping[Precision, PipelinePart] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_consistent(self) -> ModulePart:
        if sorted(_PLACEHOLDER.findall(self.source)) != sorted(["prefix", *self.each]):
            raise ValueError("source must contain {prefix} and each placeholder of `each` once, and no other")
        if len(set(self.on)) < len(self.on):
            raise ValueError("on names a group of layers twice")
        if self.precision in self.alternatives:
            raise ValueError(f"alternatives repeats the default precision {self.precision}")
        return self

    def pipelines(self) -> dict[str, PipelinePart]:
        """Every pipeline by precision, the default first."""
        return {self.precision: self, **dict(self.alternatives.items())}
