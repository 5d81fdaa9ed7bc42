"""The imports point one way, and importing the package stays light: promises to whoever adds code or a process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "weightprep"

# package -> packages of ours that it may import (errors and the package root are below all)
ALLOWED = {
    "formats": set(),
    "runtime": set(),
    "checkpoint": {"formats"},
    "contracts": {"formats"},
    "transforms": {"formats", "contracts"},
    "recipe": {"formats", "contracts", "transforms"},
    "synth": {"formats", "checkpoint"},
    "convert": {"formats", "contracts", "transforms", "recipe", "checkpoint"},
    "engines": {"formats", "contracts", "transforms", "recipe", "checkpoint", "runtime"},
    "cli": {"formats", "contracts", "transforms", "recipe", "checkpoint", "convert", "engines", "runtime", "synth"},
}


def imported_packages(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            bare = node.module == "weightprep"
            names = [f"weightprep.{alias.name}" for alias in node.names] if bare else [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("weightprep.")}
    return found - {"errors", "deferred", "__version__"}


@pytest.mark.parametrize("package", sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()))
def test_imports_point_one_way(package: str) -> None:
    assert package in ALLOWED, f"weightprep/{package} is not in the table of CONTRIBUTING.md and of this test"
    for path in (ROOT / package).rglob("*.py"):
        extra = imported_packages(path) - ALLOWED[package] - {package}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_what_plans_and_copies_takes_torch_from_one_place() -> None:
    for package in ("formats", "checkpoint", "contracts", "transforms", "recipe", "convert"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
            assert "torch" not in names, f"{path.relative_to(ROOT)}: from weightprep.deferred import torch"


def test_import_touches_no_engine_kernel_library_or_gpu() -> None:
    heavy = {"torch", "triton", "sglang", "aiter", "transformers"}
    code = f"import sys, weightprep; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plugin_registration_module_imports_no_torch_before_it_is_called() -> None:
    heavy = {"torch", "triton", "sglang", "aiter"}
    code = f"import sys, weightprep.engines.sglang.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
