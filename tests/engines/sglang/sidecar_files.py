"""Changes what a sidecar holds, with a manifest that records the change or without."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MANIFEST = Path("weightprep/manifest.json")


def edit_sidecar(model: Path, edit: Callable[[dict[str, torch.Tensor]], object], *, is_recorded: bool) -> None:
    """Apply `edit` to the tensors of each file of the sidecar of `model`.

    :param is_recorded: as a conversion that made wrong tensors would leave it; else as a disk or a copy would
    """
    made: dict[str, str] = {}
    for file in (model / MANIFEST).parent.glob("*.safetensors"):
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)
        for name, tensor in tensors.items():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            made[name] = hashlib.sha256(raw).hexdigest()
    if not is_recorded:
        return
    path = model / MANIFEST
    # written anew: the file may be linked to another sidecar's
    document = json.loads(path.read_text())
    for record in document["modules"]:
        record["target_sha256"] = {name: made[name] for name in record["target_sha256"]}
    path.unlink()
    path.write_text(json.dumps(document))
