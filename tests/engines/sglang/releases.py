"""Releases of sglang other than the installed one: their unpacked wheels, and what importing one takes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("WEIGHTPREP_TEST_CACHE", "~/.cache/weightprep-tests")).expanduser()


def unpacked(version: str) -> Path | None:
    """The unpacked wheel of a release, from the cache or the package index; None without either."""
    folder = CACHE / f"sglang-{version}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        wheels = CACHE / "wheels"
        if subprocess.run([*command, "--dest", str(wheels), f"sglang=={version}"], check=False).returncode:
            return None
        (wheel,) = wheels.glob(f"sglang-{version}-*.whl")
        partial = CACHE / f"sglang-{version}.partial-{os.getpid()}"
        zipfile.ZipFile(wheel).extractall(partial)
        partial.rename(folder)
    return folder


def prepare_import() -> None:
    """Let this process import any release without a GPU.

    Older releases register model types that a newer transformers has by itself.
    """
    import torch
    from transformers.models.auto.configuration_auto import _LazyConfigMapping

    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    register = _LazyConfigMapping.register
    _LazyConfigMapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)


def wheel(requirement: str) -> Path:
    """The wheel of a package that must not be installed here, from the cache or the package index."""
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    found = sorted((CACHE / "wheels").glob(pattern))
    if not found:
        subprocess.run([*command, "--dest", str(CACHE / "wheels"), requirement], check=False)
        found = sorted((CACHE / "wheels").glob(pattern))
    if not found:
        pytest.skip(f"no wheel of {requirement}: doctor beside it is not covered")
    return found[-1]
