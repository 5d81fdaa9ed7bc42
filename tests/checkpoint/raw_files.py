"""Builds safetensors files and checkpoints from plain bytes, sharing no code with the package, so that wrong ones can
be built too.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

INDEX = "model.safetensors.index.json"


def file_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; `header` is JSON text, bytes, or an object to dump."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def bf16(begin: int, end: int, *shape: int) -> dict[str, object]:
    """A header entry of a bf16 tensor."""
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}


def shard_bytes(names: list[str], fill: int = 1) -> bytes:
    """A correct shard of bf16 [2, 3] tensors."""
    entries = {name: bf16(12 * i, 12 * i + 12, 2, 3) for i, name in enumerate(names)}
    return file_bytes(entries, bytes([fill]) * 12 * len(names))


def write_checkpoint(root: Path, shards: dict[str, list[str]], *, index: dict[str, str] | None = None) -> Path:
    """A correct checkpoint of bf16 [2, 3] tensors: file name -> tensor names, with an index unless there is one
    shard.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"architectures": ["SomeForCausalLM"]}))
    for number, (shard, names) in enumerate(shards.items()):
        (root / shard).write_bytes(shard_bytes(names, number + 1))
    if index is None and len(shards) > 1:
        index = {name: shard for shard, names in shards.items() for name in names}
    if index is not None:
        (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return root
