"""What the witness counted, as Prometheus has it."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from weightprep.engines.sglang.metrics import CallExporter
from weightprep.runtime import witness


@pytest.fixture
def exporter() -> CallExporter:
    witness.reset()
    return CallExporter()


def test_calls_and_declined_calls_are_carried_over_once(exporter: CallExporter) -> None:
    try:
        for _ in range(2):
            with witness.calling("rocm_absorb_q_bmm", "nextn"):
                witness.count("absorb/torch/fp8/bf16")
            witness.decline("bmm_fp8", "too many rows")
            exporter.sync()
        exporter.sync()
        witness.reset()
        exporter.sync()
        taken = {"path": "absorb/torch/fp8/bf16", "layer": "nextn"}
        calls = REGISTRY.get_sample_value("weightprep_path_calls_total", taken)
        declined = {"path": "bmm_fp8", "reason": "too many rows"}
        assert (calls, REGISTRY.get_sample_value("weightprep_path_declined_total", declined)) == (2, 2)
    finally:
        witness.reset()
        for counter in (exporter._taken, exporter._declined):
            REGISTRY.unregister(counter)
