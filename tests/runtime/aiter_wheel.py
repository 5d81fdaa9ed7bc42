"""aiter's own Triton producers, from the amd-aiter wheel, without ROCm and without installing the wheel.

`import aiter` needs ROCm, and an installed aiter breaks `import sglang` without it; so the wheel is unpacked into a
cache folder and its kernel modules are imported in a process of their own, behind a stand-in package that skips
aiter/__init__.py.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "amd-aiter==0.1.7.post2.dev18"


def unpacked() -> Path | None:
    """The folder that holds aiter/; fetched by pip on first use, None where that is not possible."""
    given = os.environ.get("WEIGHTPREP_AITER_DIR")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weightprep-tests"
    target = cache / WHEEL.replace("==", "-")
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--pre", "-d", scratch, WHEEL]
            if subprocess.run(pip, capture_output=True, check=False).returncode:
                return None
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                names = [n for n in wheel.namelist() if n.startswith("aiter/ops/triton/") or n == "aiter/__init__.py"]
                wheel.extractall(Path(scratch) / "unpacked", names)
            try:
                (Path(scratch) / "unpacked").rename(target)
            except OSError:
                # another test process was first
                if not target.is_dir():
                    raise
    return target


# What aiter passes to its kernels and only the ROCm build of Triton takes.
AMD_KEYS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")


def import_triton_module(folder: Path, name: str) -> Any:
    """aiter.ops.triton.`name` of the wheel; changes sys.modules and, without a GPU, triton's driver for good."""
    import torch
    import triton

    package = types.ModuleType("aiter")
    package.__path__ = [str(folder / "aiter")]
    package.logger = logging.getLogger("aiter")  # type: ignore[attr-defined]
    package.dtypes = types.SimpleNamespace(fp8=torch.float8_e4m3fn)  # type: ignore[attr-defined]
    operators = types.ModuleType("aiter.ops")
    operators.__path__ = [str(folder / "aiter" / "ops")]
    sys.modules.setdefault("aiter", package)
    sys.modules.setdefault("aiter.ops", operators)
    if not torch.cuda.is_available():
        from triton.runtime import interpreter

        # The fp8 batched kernel assumes a positive stride of a bias that it does not have.
        interpreter.InterpreterBuilder.create_assume = lambda self, condition: None
        target = types.SimpleNamespace(arch="gfx950", backend="hip", warp_size=64)
        stand_in = types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_device_interface=lambda: torch.cpu,
        )
        triton.runtime.driver.set_active(stand_in)
    return importlib.import_module(f"aiter.ops.triton.{name}")


class WithoutAmdKeys:
    """A Triton kernel that is launched without :data:`AMD_KEYS`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        launch = self._kernel[grid]
        return lambda *args, **rest: launch(*args, **{k: v for k, v in rest.items() if k not in AMD_KEYS})
