"""What `convert --json` printed, as far as a report shows it, checked to be about the result that the report is of.

Timings of another conversion would look like this one's, so every record of a module is compared with the manifest's.
Conversions of one source with one recipe agree in all of them: where the result was written tells those apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightprep.checkpoint.json_file import read_object
from weightprep.checkpoint.manifest import Manifest
from weightprep.errors import CheckpointError

__all__ = ["RunRecord", "read_run"]

_MAX_BYTES = 64 * 2**20


class RunRecord(BaseModel):
    """The timings of one finished conversion.

    :param destination_path: absolute path of the result
    :param seconds: of execution
    :param nbytes: size of the result's weights
    :param placed: how files came over -> how many
    :param resumed_files: files that an earlier run had finished
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    schema_name: Literal["weightprep.convert/1"] = Field(alias="schema")
    state: Literal["done"]
    destination_path: str
    seconds: float = Field(ge=0, allow_inf_nan=False)
    nbytes: int = Field(alias="bytes", ge=0)
    placed: dict[str, int]
    resumed_files: int
    results: list[dict[str, Any]]


def read_run(path: Path, manifest: Manifest, destination: Path) -> RunRecord:
    """Read the document that the conversion of `destination` printed.

    :raises CheckpointError: the file is no such document, or that of another conversion
    """
    data = read_object(path, max_bytes=_MAX_BYTES)
    try:
        run = RunRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise _refuse(f"{path}: {'.'.join(str(part) for part in first['loc'])}", str(first["msg"])) from None
    if run.results != [record.model_dump(mode="json") for record in manifest.modules]:
        raise _refuse(path, f"the run of another conversion than the one that made {destination}")
    if Path(run.destination_path) != destination.resolve():
        raise _refuse(path, f"the run that made {run.destination_path}, not {destination.resolve()}")
    return run


def _refuse(subject: object, found: str) -> CheckpointError:
    return CheckpointError(
        subject,
        found=found,
        wanted="weightprep.convert/1 with state done, about this very result",
        remedy="pass what `convert --json` printed when it made this directory, or leave --run out",
    )
