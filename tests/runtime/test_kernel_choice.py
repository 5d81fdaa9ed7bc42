"""Triton where it runs, the reference elsewhere, and a refusal where Triton was asked for by name and cannot run."""

from __future__ import annotations

import pytest
import torch

from weightprep.errors import EngineError
from weightprep.runtime.choice import Backend
from weightprep.runtime.kernel_choice import use_triton


def test_the_interpreter_makes_triton_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_triton(Backend.AUTO, torch.zeros(1))
    assert use_triton(Backend.TRITON, torch.zeros(1))
    assert not use_triton(Backend.TORCH, torch.zeros(1))


def test_a_cpu_without_it_takes_the_reference_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not use_triton(Backend.AUTO, torch.zeros(1))
    with pytest.raises(EngineError, match="tensors on cpu"):
        use_triton(Backend.TRITON, torch.zeros(1))


def test_a_backend_that_the_function_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for backend in (Backend.CUDA, Backend.AITER):
        with pytest.raises(EngineError, match=f"backend '{backend.value}'"):
            use_triton(backend, torch.zeros(1))
