"""What to hook of DeepSeek-V4's compressor in a release of sglang, found without importing anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightprep.engines.sglang.source_names import resolves
from weightprep.engines.sglang.versions import COMPRESS_FORWARD, GATE, GATE_GEMM, WIDENING_GEMM

__all__ = ["CompressorTargets", "compressor_targets"]


@dataclass(frozen=True, slots=True)
class CompressorTargets:
    """Dotted names of the producer and the consumer in one release."""

    producer: str
    consumer: str


def compressor_targets(root: Path) -> CompressorTargets | None:
    """What to hook in the sglang package in directory `root`; None where the scores are not widened."""
    consumer = next((name for name in COMPRESS_FORWARD if resolves(root, name)), None)
    if consumer is None:
        return None
    if resolves(root, GATE):
        return CompressorTargets(GATE, consumer)
    if resolves(root, GATE_GEMM) and any(resolves(root, name) for name in WIDENING_GEMM):
        return CompressorTargets(GATE_GEMM, consumer)
    return None
