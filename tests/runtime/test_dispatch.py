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


def pretend(monkeypatch: pytest.MonkeyPatch, hip: str | None, capability: tuple[int, int]) -> None:
    if torch.cuda.is_available():
        pytest.skip("pretends to be on another GPU than this one")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    witness.reset()


@pytest.mark.parametrize(("hip", "capability"), [("7.2", (9, 5)), (None, (8, 9))], ids=["gfx950", "sm89"])
def test_a_call_that_our_portable_kernel_took_is_not_declined(
    hip: str | None, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, hip, capability)
    product(1)
    product(16)
    assert witness.counts() == {"absorb/triton/fp8/bf16": 2}
    assert witness.declined() == {}


def test_a_kernel_of_ours_that_cannot_take_a_call_is_passed_over_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, (9, 0))
    product(1, torch.float16)
    assert witness.counts() == {"absorb/triton/fp8/bf16": 1}
    assert witness.declined() == {}
    assert witness.passed_over() == {("absorb/cuda", "activations torch.float16 with weights torch.float8_e4m3fn"): 1}
