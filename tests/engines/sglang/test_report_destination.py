"""Where a startup report may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightprep.engines.sglang.report import REPORT_VARIABLE, check_destination
from weightprep.errors import EngineError


def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (tmp_path / "no" / "report.json", tmp_path):
        monkeypatch.setenv(REPORT_VARIABLE, str(file))
        with pytest.raises(EngineError, match="a file that cannot be written"):
            check_destination()
    monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path / "report.json"))
    check_destination()
    assert not list(tmp_path.iterdir())
