"""The part of a recipe that describes the tensors a kernel path takes, with shapes as expressions over the model's
dims.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from weightprep.recipe.base import RecipePart

__all__ = ["TensorPart"]

ContractDtype = Literal["float8_e4m3fn", "bfloat16", "float16", "float32", "uint8"]


class TensorPart(RecipePart):
    """One tensor of a contract."""

    dtype: ContractDtype = Field(description="float8_e4m3fn stands for float8_e4m3fnuz on gfx942")
    shape: tuple[str | int, ...]
    strides: tuple[str | int, ...] | None = Field(default=None, description="in elements; left out where any will do")
    finite: bool = False
    positive: bool = False

    @model_validator(mode="after")
    def _has_a_stride_for_each_size(self) -> TensorPart:
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise ValueError("strides must have one entry for each entry of shape, or be left out")
        return self
