"""The part of a recipe that says what is done to a module's weight for one precision: which steps, to what end, how
well.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, RootModel, field_validator

from weightprep.formats import Encoding
from weightprep.recipe.base import RecipePart

__all__ = ["PipelinePart", "QualityPart", "StepPart"]


class StepPart(RootModel[dict[str, dict[str, Any]]]):
    """One entry of a list of steps: a mapping with one key, the step's name, and the step's parameters under it."""

    model_config = ConfigDict(frozen=True)
    root: dict[str, dict[str, Any]] = Field(min_length=1, max_length=1)

    @field_validator("root", mode="before")
    @classmethod
    def _has_one_key(cls, value: object) -> object:
        if not isinstance(value, dict) or len(value) != 1:
            raise ValueError("a step is a mapping with one key, its name: `- dequantize: {}`")
        return {name: {} if params is None else params for name, params in value.items()}

    @property
    def name(self) -> str:
        return next(iter(self.root))

    @property
    def params(self) -> dict[str, Any]:
        return self.root[self.name]


class QualityPart(RecipePart):
    """The floor below which a conversion is refused."""

    # nothing is below a floor of NaN
    min_sqnr_db: float = Field(
        allow_inf_nan=False, description="least ratio of signal to error, in dB, of the worst head"
    )


class PipelinePart(RecipePart):
    """Steps of one precision. `store` ends in what a file can hold; `load` needs the rank's rows and the live
    module.
    """

    store: tuple[StepPart, ...] = Field(default=(), description="steps whose result is written to a checkpoint")
    load: tuple[StepPart, ...] = Field(default=(), description="steps that follow when a rank has loaded its rows")
    passes: tuple[Encoding, ...] = Field(
        default=(), description="source encodings that `store` leaves as they are unless requantization is asked for"
    )
    ensures: str = Field(description="the contract that the result keeps, a name under `contracts`")
    quality: QualityPart | None = None
