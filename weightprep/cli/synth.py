"""`weightprep synth`: a small checkpoint with an architecture's real names, to try everything without a download."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from weightprep.cli.output import command, print_json, print_lines
from weightprep.errors import RecipeError

__all__ = ["parse_size", "synth"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@command
def synth(
    dst: Annotated[Path, typer.Argument(help="The directory to write.")],
    arch: Annotated[
        str,
        typer.Option(
            help="glm_moe_dsa, glm4_moe_lite, deepseek_v2, deepseek_v2_lite, deepseek_v3, "
            "deepseek_v32, deepseek_v4, kimi_k2 or kimi_k25."
        ),
    ] = "glm_moe_dsa",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; NextN layers come on top.")] = 3,
    shards: Annotated[int, typer.Option(min=1, help="Files; 1 has no index.")] = 3,
    encoding: Annotated[str, typer.Option(help="bf16, fp8_block, ...: how the weights are stored.")] = "bf16",
    full_dims: Annotated[bool, typer.Option("--full-dims", help="The published sizes of the attention.")] = False,
    size: Annotated[str | None, typer.Option(help="Fill up with experts to this size, for example 6GB.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Write a small checkpoint with random weights and an architecture's real names, dtypes and layout.

    Examples:

      weightprep synth /tmp/tiny

      weightprep synth /tmp/big --full-dims --size 6GB --shards 12 --encoding fp8_block
    """
    from weightprep.checkpoint.repository import Checkpoint
    from weightprep.synth import synthesize

    bytes_wanted = None if size is None else parse_size(size)
    synthesize(
        dst, arch, layers=layers, shards=shards, encoding=encoding, full_dims=full_dims, size=bytes_wanted, seed=seed
    )
    made = Checkpoint.open(dst)
    nbytes = sum(header.file_size for header in made.shards.values())
    if json:
        print_json(
            "synth", {"path": str(dst), "shards": len(made.shards), "tensors": len(made.tensors), "bytes": nbytes}
        )
    else:
        print_lines(f"{dst}: {len(made.tensors)} tensors in {len(made.shards)} shard(s), {nbytes:,} bytes")
    return None


def parse_size(text: str) -> int:
    """Bytes of "6GB", "512 MiB" or "1000".

    :raises RecipeError: anything else
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise RecipeError(
            "--size", found=repr(text), wanted="a number with a unit", remedy="for example: --size 6GB or --size 512MiB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])
