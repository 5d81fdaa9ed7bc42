"""The base of every model of a recipe: unknown keys are errors, and nothing changes after parsing."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["RecipePart"]


class RecipePart(BaseModel):
    """Strict about keys, frozen after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
