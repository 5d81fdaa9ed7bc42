"""What the process of the tests must have before anything is imported: a choice of Triton's, and interrupts."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
import torch

# Without a GPU, Triton kernels run in Triton's interpreter; that choice is read when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A job in the background of a script ignores interrupts, and so does whatever it starts; the tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where WEIGHTPREP_NO_SKIPS is set, what a developer's machine may lack (a wheel, a browser) has to be there."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("WEIGHTPREP_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped where nothing may be: {report.longrepr}"
    return report
