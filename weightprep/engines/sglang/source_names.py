"""Whether a package's source text defines a name: looked up, not imported.

`doctor` must answer on machines where sglang does not import, and a process must not import model code before its
environment is final.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

__all__ = ["resolves"]


@lru_cache(maxsize=128)
def resolves(root: Path, dotted: str) -> bool:
    """Whether the sglang package in `root` defines the module-level name or class attribute `dotted`.

    A name imported from elsewhere counts where it is a module's own name, as sglang re-exports some.
    """
    parts = dotted.split(".")[1:]
    for split in range(len(parts), 0, -1):
        for file in (root.joinpath(*parts[:split]).with_suffix(".py"), root.joinpath(*parts[:split], "__init__.py")):
            if file.is_file():
                return _defines(_parse(file), parts[split:])
    return False


@lru_cache(maxsize=32)
def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _defines(tree: ast.Module | None, names: list[str]) -> bool:
    body: list[ast.stmt] = tree.body if tree is not None else []
    for position, name in enumerate(names):
        found = next((node for node in body if name in _names(node)), None)
        if found is None:
            return False
        if position + 1 < len(names):
            if not isinstance(found, ast.ClassDef):
                return False
            body = found.body
    return bool(names) and tree is not None


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.If | ast.Try):
        # sglang binds the kernels of one platform in a branch.
        return {name for inner in (*node.body, *node.orelse) for name in _names(inner)}
    return set()
