"""A Hugging Face cache that looks as a download leaves it: links from a snapshot into the blobs beside it."""

from __future__ import annotations

import os
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def into_cache(model: Path, cache: Path) -> Path:
    """`model` as revision main of org/name in a Hugging Face cache; returns the snapshot."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for number, file in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        blob, link = repository / "blobs" / str(number), snapshot / file.relative_to(model)
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot
