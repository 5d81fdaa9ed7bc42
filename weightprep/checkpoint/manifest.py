"""What a conversion leaves behind about itself: `weightprep.json` and a sidecar's `manifest.json`, one schema for both.

The record holds what a later reader cannot recompute from the result alone: which bytes each converted tensor was
made from, with which recipe, and how much accuracy that cost. It has no time and no path in it, so that equal
conversions make equal files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightprep.checkpoint.json_file import read_object
from weightprep.errors import CheckpointError

__all__ = ["MANIFEST_NAME", "SIDECAR_MANIFEST", "Manifest", "ModuleRecord", "QualityRecord", "read_manifest"]

MANIFEST_NAME = "weightprep.json"
SIDECAR_MANIFEST = Path("weightprep/manifest.json")
_MAX_BYTES = 256 * 2**20
# Far more than any model has; a report draws them.
_MAX_LAYERS = 100_000
_ENCODING = r"^[a-z][a-z0-9_]*$"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class QualityRecord(_Frozen):
    """How the stored numbers differ from the source's, both in float32.

    :param relative_error: norm of the difference over the norm of the source; where the source is zero, 0 if the
        result is zero too, else 1
    :param sqnr_db: signal to quantization noise in dB; None where there is no noise or no signal
    :param worst_head_sqnr_db: the least of the same of each head, which is what a recipe's floor applies to; None where
        no head has noise, or rows are not heads
    :param max_error: largest absolute difference
    :param amax: largest magnitude of the source
    :param head_amax_ratio: largest over smallest per-head maximum; None where a head is zero or there are no heads
    """

    relative_error: float
    sqnr_db: float | None
    worst_head_sqnr_db: float | None
    max_error: float
    amax: float
    head_amax_ratio: float | None


class ModuleRecord(_Frozen):
    """One converted module.

    :param file: the file that holds the result, relative to the checkpoint directory
    :param source_encoding: how the source stored it ("bf16", "fp8_block", ...)
    :param target_encoding: how the result stores it
    :param source_sha256: tensor name in the source -> SHA-256 of its bytes; every tensor of the source is in it
    :param target_sha256: tensor name in the result -> SHA-256 of its bytes
    :param scale: the tensor's one scale; None where it has several or none
    :param overrides_exclude: the entry of the checkpoint's own exclude list that asked to leave the module alone
    """

    module: str
    layer: int = Field(ge=0, lt=_MAX_LAYERS)
    group: str
    file: str
    source_encoding: str = Field(pattern=_ENCODING)
    target_encoding: str = Field(pattern=_ENCODING)
    source_sha256: dict[str, str] = Field(min_length=1)
    target_sha256: dict[str, str] = Field(min_length=1)
    scale: float | None
    quality: QualityRecord
    overrides_exclude: str | None = None


class Manifest(_Frozen):
    """The whole record, modules in the recipe's order.

    :param precision: by layer group, however it was asked for; None where no module has a choice
    :param quality_loss_allowed: whether floors were waived
    :param below_floor: modules whose SQNR is below the recipe's floor
    :param dropped: source tensors that have no counterpart in the result
    """

    schema_name: Literal["weightprep.manifest/1"] = "weightprep.manifest/1"
    tool_version: str
    layout: Literal["inline", "sidecar"]
    # a name and never a path: whoever reads a manifest would open it
    recipe: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    recipe_hash: str
    precision: str | dict[str, str] | None
    nextn: Literal["convert", "keep"]
    requantize: bool
    quality_loss_allowed: bool
    below_floor: tuple[str, ...]
    dropped: tuple[str, ...]
    modules: tuple[ModuleRecord, ...]

    def to_json(self) -> bytes:
        """The file's bytes: two spaces, the fields' own order, mappings sorted."""
        data = self.model_dump(mode="json")
        data = {"schema": data.pop("schema_name"), **data}
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def read_manifest(path: Path) -> Manifest:
    """Read the manifest file at `path`.

    :raises CheckpointError: it is missing, no JSON, or not this schema
    """
    data = read_object(path, max_bytes=_MAX_BYTES)
    try:
        return Manifest.model_validate({"schema_name": data.pop("schema", None), **data})
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{path}: {'.'.join(str(part) for part in first['loc'])}",
            found=first["msg"],
            wanted="a manifest of schema weightprep.manifest/1",
            remedy="convert again with this version of weightprep",
        ) from None
