"""Which backend takes a call on a GPU, told to tensors of the CPU that say that they are on one."""

from __future__ import annotations

import pytest
import torch
from absorb_oracle import Weight, assert_close

from weightprep.runtime import dispatch, witness
from weightprep.runtime.choice import ActQuant, Backend


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


def product(m: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """One absorbed product under AUTO; Triton's interpreter computes it."""
    weight = Weight.make("e4m3fn", 2, 512, 256, "cpu")
    x = torch.randn((m, 2, 512), generator=torch.Generator().manual_seed(m)).bfloat16().to(dtype)
    out, none = torch.empty((m, 2, 256), dtype=torch.bfloat16), torch.empty((0, 0))
    on_gpu = x.as_subclass(OnGpu)
    dispatch.absorb(on_gpu, weight.w, weight.scale, None, None, out, none, ActQuant.AUTO, Backend.AUTO)
    assert_close(out, x, weight)


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("pretends to be on another GPU than this one")
    monkeypatch.setattr(dispatch, "arch_of", lambda _: arch)
    if arch.startswith("gfx"):
        monkeypatch.setattr(torch.version, "hip", "7.2")
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(int(arch[2:]), 10))
    witness.reset()


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm89", "sm100", "sm120"])
def test_an_arch_without_a_table_takes_the_portable_kernel_and_declines_nothing(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, arch)
    product(1)
    product(16)
    assert witness.counts() == {"absorb/triton/fp8/bf16": 2}
    assert witness.declined() == {}
    assert witness.passed_over() == {}


def test_a_kernel_of_ours_that_cannot_take_a_call_is_passed_over_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "sm90")
    product(1, torch.float16)
    assert witness.counts() == {"absorb/triton/fp8/bf16": 1}
    assert witness.declined() == {}
    assert witness.passed_over() == {("absorb/cuda", "activations torch.float16 with weights torch.float8_e4m3fn"): 1}
