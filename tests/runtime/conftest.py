"""Kernels run compiled on a GPU where there is one, otherwise in the interpreter with exact casts."""

from __future__ import annotations

import pytest
import torch
from interpreter import install_exact_casts

if not torch.cuda.is_available():
    install_exact_casts()


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
