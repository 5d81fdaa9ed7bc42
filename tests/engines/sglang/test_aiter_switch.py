"""SGLANG_USE_AITER: without it the kernels that gfx950's gates name are not taken, and a load says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import on_ranks
import pytest
import torch
from ranks import Ranks
from tiny_models import LAYERS

from weightprep.engines.sglang.hardware import aiter_is_on


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "0", "false", "yes", ""])
def test_the_variable_is_read_as_sglang_reads_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils.common import get_bool_env_var

    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setenv("SGLANG_USE_AITER", value)
    assert aiter_is_on() is get_bool_env_var("SGLANG_USE_AITER")


def test_it_is_off_on_rocm_where_nothing_is_said_and_means_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aiter_is_on({})
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert not aiter_is_on({})


def report_without_aiter(state: Any, path: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    ours = "weightprep.engines.sglang"
    # the real switch also needs a torch for ROCm, whose sglang does not load on a CPU
    with patch(f"{ours}.report.aiter_is_on", lambda: False), patch(f"{ours}.contract_check.aiter_is_on", lambda: False):
        return on_ranks.report_and_log(state, path, folder)


def test_a_load_without_it_tells_the_path_that_is_left(tp1: Ranks, glm: Path, tmp_path: Path) -> None:
    report, log = tp1.run(report_without_aiter, glm, tmp_path)[0]
    assert [(layer["path"], layer["fast"]) for layer in report["layers"]] == [("fp8_dequantized", False)] * LAYERS
    (warning,) = [line for line in log if "SGLANG_USE_AITER" in line]
    assert "export SGLANG_USE_AITER=1" in warning
