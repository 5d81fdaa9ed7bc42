"""The part of a recipe that says what is done to a module's weight for one precision: which steps, to what end, how
well.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from weightprep.formats import Encoding
from weightprep.recipe.base import RecipePart

__all__ = ["PipelinePart", "QualityPart", "StepPart"]


class StepPart(RecipePart):
    """One entry of a list of steps: a mapping from the step's name to its parameters."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)


class QualityPart(RecipePart):
    """The floor below which a conversion is refused."""

    min_sqnr_db: float = Field(description="least ratio of the weight's power to that of the error, in dB, per tensor")


class PipelinePart(RecipePart):
    """Steps of one precision. `store` ends in what a checkpoint can hold; `load` needs the rank's rows and the live
    module.
    """

    store: tuple[StepPart, ...] = Field(default=(), description="steps whose result is written to a checkpoint")
    load: tuple[StepPart, ...] = Field(default=(), description="steps that follow when a rank has loaded its rows")
    passes: tuple[Encoding, ...] = Field(
        default=(), description="source encodings that `store` leaves as they are unless requantization is asked for"
    )
    ensures: str = Field(description="the contract that the result keeps, a name under `contracts`")
    quality: QualityPart | None = None

    @field_validator("store", "load", mode="before")
    @classmethod
    def _steps(cls, value: object) -> object:
        if not isinstance(value, (list, tuple)):
            return value
        steps: list[object] = []
        for entry in value:
            if isinstance(entry, dict) and len(entry) == 1:
                ((name, params),) = entry.items()
                steps.append({"name": name, "params": {} if params is None else params})
            else:
                raise ValueError("a step is a mapping with one key, its name: `- dequantize: {}`")
        return steps
