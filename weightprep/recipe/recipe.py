"""A recipe as a whole, and what its parts must say about each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from weightprep.recipe.base import RecipePart
from weightprep.recipe.contract import TensorPart
from weightprep.recipe.module import LayerPart, ModulePart

__all__ = ["Recipe", "WrapperPart"]


class WrapperPart(RecipePart):
    """How an architecture that wraps a language model differs from that model."""

    prefix: str = Field(
        description="what precedes every tensor name of the language model, for example language_model."
    )
    config: str = Field(description="key of config.json under which the language model's config stands")


class Recipe(RecipePart):
    """What is to be done for one family of architectures."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this format")
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    description: str = ""
    architectures: tuple[str, ...] = Field(
        min_length=1, description="entries of config.json's architectures that it is for"
    )
    model_types: tuple[str, ...] = Field(
        default=(), description="chosen before other recipes of the architecture for these"
    )
    by_name_only: bool = Field(default=False, description="never chosen by architecture, only by name")
    wrappers: Mapping[str, WrapperPart] = Field(default_factory=dict, description="by architecture")
    dims: Mapping[str, str] = Field(default_factory=dict, description="short name of a dim: its key in config.json")
    layers: Mapping[str, LayerPart] = Field(default_factory=dict)
    modules: Mapping[str, ModulePart] = Field(default_factory=dict)
    contracts: Mapping[str, Mapping[str, TensorPart]] = Field(default_factory=dict)
    nothing_to_convert: str | None = Field(
        default=None, description="why a recipe without modules has nothing to convert; its contracts are still checked"
    )

    @property
    def hash(self) -> str:
        """sha256 of the recipe's content in canonical JSON: the same for files that differ in comments or key order
        only.
        """
        content = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()
