"""The canary through the kernels that a server runs: upstream's functions on ROCm, and weights in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_canary import HEADS, NOPE, RANK, SOUND, V, sample

from weightprep.engines.sglang.canary import Sample, run_canary
from weightprep.engines.sglang.kernels import RocmKernels
from weightprep.errors import EngineError

FAULTS = ["transposed output", "wrong stride", "scale ignored", "per-head scale"]


def mxfp4_sample() -> Sample:
    """Packed values whose scales differ from group to group, as the kernels take them."""
    generator = torch.Generator().manual_seed(5)

    def packed(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randint(0, 256, (HEADS, rows, k // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 123, (HEADS, rows, k // 32), generator=generator, dtype=torch.uint8)
        return values.transpose(1, 2), scales.transpose(1, 2)

    (w_kc, w_scale_k), (w_vc, w_scale_v) = packed(RANK, NOPE), packed(V, RANK)
    return Sample("layer 0 (decoder)", "mxfp4_absorbed", w_kc, w_vc, 1.0, w_scale_k, w_scale_v)


class RocmModule:
    """forward_mla_rocm's two functions with the eager reference for a kernel, and a fault in what they hand it."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def rocm_absorb_q_bmm(self, attn: Any, q_nope: torch.Tensor, *, is_capture_mode: bool) -> torch.Tensor:
        """(M, H, nope) -> head-major (H, M, rank), as upstream's returns it."""
        return self._spoiled(SOUND.q(q_nope, self._seen(attn)).transpose(0, 1), heads=0)

    def rocm_absorb_v_bmm(self, attn: Any, attn_out: torch.Tensor) -> torch.Tensor:
        """(M, H, rank) -> (M, H * v)."""
        return self._spoiled(SOUND.v(attn_out, self._seen(attn)), heads=1).flatten(1, 2)

    def _seen(self, attn: SimpleNamespace) -> Sample:
        scales = [attn.w_scale_k, attn.w_scale_v]
        weights = [attn.w_kc, attn.w_vc]
        w_scale = attn.w_scale
        if self.fault == "wrong stride":
            # bytes of [N, K] read as [K, N]
            weights = [w.transpose(1, 2).reshape(w.shape) for w in weights]
        if self.fault == "scale ignored":
            w_scale = torch.tensor(1.0) if isinstance(w_scale, torch.Tensor) else w_scale
            scales = [None if s is None else torch.full_like(s, 127) for s in scales]
        return replace(Sample("", "", *weights, w_scale), w_scale_k=scales[0], w_scale_v=scales[1])

    def _spoiled(self, out: torch.Tensor, heads: int) -> torch.Tensor:
        if self.fault == "transposed output":
            return out.transpose(0, 1).reshape(out.shape)
        if self.fault == "per-head scale":
            shape = [1, 1, 1]
            shape[heads] = HEADS
            return out * torch.tensor([1.0, 1.6, 0.5, 1.4]).view(shape)
        return out


@pytest.mark.parametrize("given", [sample(), mxfp4_sample()], ids=["fp8", "mxfp4"])
def test_upstreams_rocm_functions_pass(given: Sample) -> None:
    assert run_canary([given, given], RocmKernels(RocmModule())) == 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("given", [sample(), mxfp4_sample()], ids=["fp8", "mxfp4"])
def test_faults_of_upstreams_rocm_functions_are_caught(given: Sample, fault: str) -> None:
    path = "mxfp4_absorbed" if given.w_kc.dtype is torch.uint8 else "fp8_absorbed"
    with pytest.raises(EngineError, match=rf"canary of layer 0 \(decoder\): absorbed [qv] of path '{path}'"):
        run_canary([given], RocmKernels(RocmModule(fault)))


@pytest.mark.parametrize("role", ["w_scale_k", "w_scale_v"])
def test_each_mxfp4_scale_is_looked_at(role: str) -> None:
    """A kernel that reads the scales of one group for its neighbour's."""
    given = mxfp4_sample()

    class Shifted:
        def q(self, q_nope: torch.Tensor, asked: Sample) -> torch.Tensor:
            return SOUND.q(q_nope, self._shifted(asked))

        def v(self, attn_out: torch.Tensor, asked: Sample) -> torch.Tensor:
            return SOUND.v(attn_out, self._shifted(asked))

        def _shifted(self, asked: Sample) -> Sample:
            return replace(asked, **{role: getattr(asked, role).roll(1, dims=1)})

    which = "q" if role == "w_scale_k" else "v"
    with pytest.raises(EngineError, match=f"absorbed {which} of path 'mxfp4_absorbed'"):
        run_canary([given], Shifted())
