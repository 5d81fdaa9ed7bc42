"""The canary against kernels that are broken in the ways in which kernels break."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightprep.engines.sglang.canary import Sample, run_canary
from weightprep.engines.sglang.kernels import RuntimeKernels
from weightprep.errors import EngineError
from weightprep.runtime.choice import Backend

HEADS, NOPE, RANK, V = 4, 192, 512, 256
SOUND = RuntimeKernels(Backend.TORCH)


def sample() -> Sample:
    generator = torch.Generator().manual_seed(3)
    w_kc = (torch.randn(HEADS, RANK, NOPE, generator=generator) * 100).to(torch.float8_e4m3fn).transpose(1, 2)
    w_vc = (torch.randn(HEADS, V, RANK, generator=generator) * 100).to(torch.float8_e4m3fn).transpose(1, 2)
    return Sample("layer 0 (decoder)", "fp8_absorbed", w_kc, w_vc, torch.tensor(2.5e-4))


class Broken:
    """Kernels that see other weights than they are given, or return something else."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def q(self, q_nope: torch.Tensor, given: Sample) -> torch.Tensor:
        return self._after(SOUND.q(q_nope, self._before(given)))

    def v(self, attn_out: torch.Tensor, given: Sample) -> torch.Tensor:
        return self._after(SOUND.v(attn_out, self._before(given)))

    def _before(self, given: Sample) -> Sample:
        if self.fault == "wrong stride":
            # bytes of [N, K] read as [K, N]
            read = [w.transpose(1, 2).reshape(w.shape) for w in (given.w_kc, given.w_vc)]
            return replace(given, w_kc=read[0], w_vc=read[1])
        if self.fault == "scale ignored":
            return replace(given, w_scale=torch.tensor(1.0))
        return given

    def _after(self, out: torch.Tensor) -> torch.Tensor:
        if self.fault == "transposed output":
            return out.transpose(0, 1)
        if self.fault == "transposed bytes":
            return out.transpose(0, 1).reshape(out.shape)
        if self.fault == "per-head scale":
            return out * torch.tensor([1.0, 1.2, 0.8, 1.1]).view(1, HEADS, 1)
        if self.fault == "last token unwritten":
            return torch.cat([out[:-1], torch.full_like(out[-1:], float("nan"))])
        return out


def test_sound_kernels_pass_and_equal_layers_run_once() -> None:
    first = sample()
    other_shape = replace(first, w_kc=first.w_kc[:2], w_vc=first.w_vc[:2])
    assert run_canary([first, first, other_shape], SOUND) == 2


@pytest.mark.parametrize("heads", [HEADS, 24])
def test_without_a_gpu_eight_heads_stand_for_all_and_keep_their_strides(heads: int) -> None:
    seen = set()

    class Watched:
        def q(self, q_nope: torch.Tensor, given: Sample) -> torch.Tensor:
            seen.add((q_nope.shape[1], given.w_kc.shape[0], given.w_kc.stride()))
            return SOUND.q(q_nope, given)

        def v(self, attn_out: torch.Tensor, given: Sample) -> torch.Tensor:
            seen.add((attn_out.shape[1], given.w_vc.shape[0], given.w_vc.stride()))
            return SOUND.v(attn_out, given)

    one = sample()
    w_kc, w_vc = (torch.cat([w.transpose(1, 2)] * (heads // HEADS)).transpose(1, 2) for w in (one.w_kc, one.w_vc))
    assert run_canary([replace(one, w_kc=w_kc, w_vc=w_vc)], Watched()) == 1
    taken = min(heads, 8)
    assert seen == {(taken, taken, one.w_kc.stride()), (taken, taken, one.w_vc.stride())}


@pytest.mark.parametrize(
    "fault",
    [
        "transposed output",
        "transposed bytes",
        "wrong stride",
        "scale ignored",
        "per-head scale",
        "last token unwritten",
    ],
)
def test_broken_kernels_are_caught(fault: str) -> None:
    with pytest.raises(EngineError, match=r"canary of layer 0 \(decoder\): absorbed q of path 'fp8_absorbed'"):
        run_canary([sample()], Broken(fault))
