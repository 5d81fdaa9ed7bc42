"""The canary against kernels that are broken in the ways in which kernels break."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightprep.engines.sglang import canary
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


def many_heads(encoding: str, heads: int) -> Sample:
    """All heads differ; MXFP4 has scales that differ from group to group."""
    generator = torch.Generator().manual_seed(11)
    if encoding == "fp8":
        shapes = [(heads, 128, 64), (heads, 32, 128)]
        w_kc, w_vc = (
            (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn).transpose(1, 2) for shape in shapes
        )
        # (heads, N, K) transposed: w_kc is (heads, nope 64, rank 128), w_vc (heads, rank 128, v 32)
        return Sample("layer 0 (decoder)", "fp8_absorbed", w_kc, w_vc, torch.tensor(2.5e-4))
    packed = [
        torch.randint(0, 256, (heads, rows, k // 2), generator=generator, dtype=torch.uint8).transpose(1, 2)
        for rows, k in ((128, 64), (32, 128))
    ]
    scales = [
        torch.randint(118, 123, (heads, rows, k // 32), generator=generator, dtype=torch.uint8).transpose(1, 2)
        for rows, k in ((128, 64), (32, 128))
    ]
    return Sample("layer 0 (decoder)", "mxfp4_absorbed", *packed, 1.0, *scales)


class OneHead:
    """Kernels whose last head is `factor` times what it should be, for batches of `only` tokens or for all."""

    def __init__(self, factor: float, only: int | None = None) -> None:
        self.factor, self.only = factor, only

    def q(self, q_nope: torch.Tensor, given: Sample) -> torch.Tensor:
        return self._spoiled(SOUND.q(q_nope, given))

    def v(self, attn_out: torch.Tensor, given: Sample) -> torch.Tensor:
        return self._spoiled(SOUND.v(attn_out, given))

    def _spoiled(self, out: torch.Tensor) -> torch.Tensor:
        if self.only not in (None, len(out)):
            return out
        return torch.cat([out[:, :-1], out[:, -1:] * self.factor], dim=1)


@pytest.mark.parametrize(
    ("encoding", "factor", "only"),
    [("fp8", 1.3, None), ("fp8", 1.3, 1), ("fp8", 1.3, 17), ("mxfp4", 0.0, None), ("mxfp4", 0.0, 1)],
)
def test_one_broken_head_of_64_is_caught(
    encoding: str, factor: float, only: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where all heads run: in their norm it is 0.3 / 8 = 0.04 of 0.056, and 1 / 8 of 0.25."""
    monkeypatch.setattr(canary, "_CPU_HEADS", 64)
    given = many_heads(encoding, 64)
    assert run_canary([given], SOUND) == 1
    with pytest.raises(EngineError, match=r"absorbed q of path '.*', head 63: found a relative error of"):
        run_canary([given], OneHead(factor, only))


@pytest.mark.parametrize("encoding", ["fp8", "mxfp4"])
def test_a_head_of_zeros_must_come_out_as_zeros(encoding: str) -> None:
    given = many_heads(encoding, 4)
    given.w_kc[-1], given.w_vc[-1] = 0, 0
    assert run_canary([given], SOUND) == 1

    class Leaking(OneHead):
        def _spoiled(self, out: torch.Tensor) -> torch.Tensor:
            return torch.cat([out[:, :-1], torch.full_like(out[:, -1:], 1e-6)], dim=1)

    with pytest.raises(EngineError, match=r"absorbed q of path '.*', head 3: found a relative error of inf"):
        run_canary([given], Leaking(1.0))


def test_the_scales_of_mxfp4_are_cut_with_the_heads() -> None:
    """Without a GPU eight of 24 heads run."""
    seen = set()

    class Watched(OneHead):
        def _spoiled(self, out: torch.Tensor) -> torch.Tensor:
            return out

        def q(self, q_nope: torch.Tensor, given: Sample) -> torch.Tensor:
            for name in ("w_kc", "w_vc", "w_scale_k", "w_scale_v"):
                tensor, whole = getattr(given, name), getattr(whole_sample, name)
                assert torch.equal(tensor, whole[:8])
                seen.add((name, tensor.stride() == whole.stride()))
            return super().q(q_nope, given)

    whole_sample = many_heads("mxfp4", 24)
    assert run_canary([whole_sample], Watched(1.0)) == 1
    assert seen == {(name, True) for name in ("w_kc", "w_vc", "w_scale_k", "w_scale_v")}
