"""The name under which the tuning tables know a GPU: its instruction set, which decides what a kernel may use."""

from __future__ import annotations

import functools

import torch

__all__ = ["arch_of"]


@functools.cache
def arch_of(device: torch.device) -> str:
    """Such as "sm90" or "gfx950", and the type of a device that is no GPU; compute capability 9.0 is always "sm90"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
