"""Counts for Prometheus: how many layers were given which path, and how many calls took which.

sglang's processes share their metrics through a directory that it names in the environment when a server was started
with --enable-metrics. Only then, and where prometheus_client is installed, anything happens here.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from weightprep.runtime import witness

__all__ = ["CallExporter", "export_layers"]

_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = 5.0
_gauge: Any = None


def export_layers(paths: Mapping[str, int]) -> None:
    """Set `weightprep_layers{path}`, and from now on count calls and declined calls after the witness."""
    global _gauge
    if _DIRECTORY not in os.environ or importlib.util.find_spec("prometheus_client") is None:
        return
    from prometheus_client import Gauge

    if _gauge is None:
        _gauge = Gauge("weightprep_layers", "Layers of this rank by kernel path", ["path"], multiprocess_mode="livesum")
        exporter = CallExporter()
        threading.Thread(target=exporter.run, name="weightprep-metrics", daemon=True).start()
    for path, count in paths.items():
        _gauge.labels(path).inc(count)


class CallExporter:
    """Carries the witness's counts over to Prometheus counters, which can only be added to."""

    def __init__(self) -> None:
        from prometheus_client import Counter as PrometheusCounter

        self._taken = PrometheusCounter(
            "weightprep_path_calls", "Absorbed matmuls by kernel path and kind of layer", ["path", "layer"]
        )
        self._declined = PrometheusCounter(
            "weightprep_path_declined", "Calls that a hooked function left to sglang's own", ["path", "reason"]
        )
        self._exported: Counter[tuple[Any, tuple[str, str]]] = Counter()

    def sync(self) -> None:
        """Add what was counted since the last call."""
        for labels, count in witness.counts_by_layer().items():
            self._add(self._taken, labels, count)
        for labels, count in witness.declined().items():
            self._add(self._declined, labels, count)

    def _add(self, counter: Any, labels: tuple[str, str], count: int) -> None:
        # the witness may have been reset in between
        counter.labels(*labels).inc(max(0, count - self._exported[counter, labels]))
        self._exported[counter, labels] = count

    def run(self) -> None:
        """Sync for as long as the process lives."""
        while True:
            self.sync()
            time.sleep(_SECONDS)
