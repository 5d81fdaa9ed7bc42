"""The canary through the kernels that a server runs: upstream's functions on ROCm and CUDA, and weights in MXFP4."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_canary import HEADS, NOPE, RANK, SOUND, V, sample

from weightprep.engines.sglang import kernels, runtime_hooks
from weightprep.engines.sglang.canary import Sample, run_canary
from weightprep.engines.sglang.kernels import CudaKernels, RocmKernels, server_kernels
from weightprep.errors import EngineError
from weightprep.runtime import witness

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


def bmm_fp8(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """flashinfer's by its interface: a (H, M, K) row-major and b (H, K, N) column-major in e4m3fn, a scale each."""
    assert a.is_contiguous()
    assert b.transpose(1, 2).is_contiguous()
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a_scale.dtype == b_scale.dtype == torch.float32
    assert a_scale.numel() == b_scale.numel() == 1
    return (torch.bmm(a.float(), b.float()) * a_scale * b_scale).to(dtype)


def hooked(*arguments: Any) -> torch.Tensor:
    return runtime_hooks.cuda_bmm_fp8(bmm_fp8, *arguments)


@pytest.mark.parametrize(("kernel", "calls"), [(bmm_fp8, 0), (hooked, 6)], ids=["upstream", "hooked"])
def test_cuda_canary_calls_bmm_fp8_as_the_server_does(kernel: Callable[..., torch.Tensor], calls: int) -> None:
    witness.reset()
    assert run_canary([sample()], CudaKernels(SimpleNamespace(bmm_fp8=kernel))) == 1
    # q and v with three batches each
    assert witness.counts() == ({"absorb/torch/fp8/bf16": calls} if calls else {})


def test_cuda_canary_of_bf16_weights_needs_no_bmm_fp8() -> None:
    given = sample()
    wide = replace(given, w_kc=given.w_kc.bfloat16(), w_vc=given.w_vc.bfloat16(), w_scale=1.0)
    assert run_canary([wide], CudaKernels(SimpleNamespace())) == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda a, b, x, w, dtype: bmm_fp8(a, b, torch.ones(1), w, dtype),
        lambda a, b, x, w, dtype: bmm_fp8(a, b, x, torch.ones(1), dtype),
        lambda a, b, x, w, dtype: bmm_fp8(a, b.reshape(b.shape[0], -1, b.shape[1]).transpose(1, 2), x, w, dtype),
        lambda a, b, x, w, dtype: bmm_fp8(a, b, x, w, dtype).transpose(0, 1).reshape(a.shape[0], -1, b.shape[2]),
    ],
    ids=["activation scale ignored", "weight scale ignored", "wrong stride", "transposed output"],
)
def test_faults_of_bmm_fp8_are_caught(fault: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(EngineError, match=r"absorbed q of path 'fp8_absorbed'"):
        run_canary([sample()], CudaKernels(SimpleNamespace(bmm_fp8=fault)))


@pytest.mark.parametrize("runtime", ["auto", "triton", "upstream"])
def test_cuda_servers_are_checked_through_sglangs_own_name(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU and sglang's CUDA branch are pretended; what is shown is which callable the canary gets."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    module = SimpleNamespace(bmm_fp8=bmm_fp8)
    monkeypatch.setitem(sys.modules, kernels.FORWARD_MLA, module)
    assert server_kernels(runtime) == CudaKernels(module)
