"""Every file of a directory tree by its bytes: two trees with equal hashes are the same conversion."""

from __future__ import annotations

import hashlib
from pathlib import Path


def hashes(root: Path) -> dict[str, str]:
    """Path below `root` -> SHA-256 of the file."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
