"""The wheel that users install holds the recipes and finds them far from a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel installed in it, without its dependencies (the running environment has them)."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT], check=True)
    (wheel,) = wheels.glob("weightprep-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def run_installed(site: Path, code: str, cwd: Path) -> str:
    # an explicit path, before the editable install of the checkout
    script = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=cwd, check=True)
    return done.stdout


def test_installed_package_finds_every_recipe_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        "import weightprep, weightprep.recipe as r;"
        "print(weightprep.__file__); print(*(recipe.name for recipe in r.list_recipes()))"
    )
    where, names = run_installed(installed, code, tmp_path).splitlines()
    assert Path(where).is_relative_to(installed)
    assert set(names.split()) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def test_wheel_registers_the_sglang_plugin_and_the_command(installed: Path) -> None:
    (entry_points,) = installed.glob("weightprep-*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "[sglang.srt.plugins]\nweightprep = weightprep.engines.sglang.plugin:register" in text
    assert "weightprep = weightprep.__main__:main" in text
    assert (installed / "weightprep" / "py.typed").exists()
