"""The base of every model of a recipe: unknown keys are errors that know the right ones, and nothing changes after
parsing.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["UNKNOWN_KEY", "RecipePart"]

# Type of the error for an unknown key; its context has the `key` and the `known` keys of that place.
UNKNOWN_KEY = "unknown_key"


class RecipePart(BaseModel):
    """Strict about keys, frozen after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _knows_every_key(cls, value: object) -> object:
        # pydantic's own error for this does not say which keys there are.
        if isinstance(value, Mapping):
            known = tuple(field.alias or name for name, field in cls.model_fields.items())
            for key in value:
                if key not in known:
                    raise PydanticCustomError(UNKNOWN_KEY, "an unknown key", {"key": str(key), "known": known})
        return value
