"""Stand-in for the CUDA-only sgl_kernel wheel on a machine without libcuda: names resolve, calls raise."""

from __future__ import annotations

from typing import Any

__path__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called on a machine without a GPU")

    return missing
