"""What upstream would make of a weight is not made where it would be thrown away, and is where it may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_ranks
import pytest
import torch
from ranks import Ranks
from test_prepare import assert_same_bits
from torch import nn

from weightprep.engines.sglang.modules import LiveModule
from weightprep.engines.sglang.stand_in import stand_ins


def live(linear: Any) -> LiveModule:
    owner = nn.Module()
    owner.kv_b_proj = linear
    plan: Any = SimpleNamespace(source="model.layers.0.self_attn.kv_b_proj")
    return LiveModule(plan, owner, getattr(linear, "base_layer", linear))


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.ones(8, 4).to(dtype), requires_grad=False)
    made.weight_scale_inv = nn.Parameter(torch.ones(1, 1), requires_grad=False)
    made.tp_size = 2
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_stand_in_has_no_storage_and_goes_away(dtype: torch.dtype) -> None:
    module = live(linear(dtype))

    def fail() -> None:
        raise KeyError

    with stand_ins([module], "fp8"):
        seen = module.owner.kv_b_proj
    assert (seen.weight.device.type, seen.weight.dtype, seen.weight.shape) == ("meta", torch.bfloat16, (8, 4))
    assert not hasattr(seen, "weight_scale_inv")
    assert seen.tp_size == 2
    with pytest.raises(KeyError), stand_ins([module], "fp8"):
        fail()
    assert module.owner.kv_b_proj is module.linear
    assert module.linear.weight.dtype is dtype
    assert module.linear.weight_scale_inv.numel() == 1


def test_what_upstream_makes_its_own_way_stays() -> None:
    quark, awq, wrapped = live(linear()), live(nn.Module()), nn.Module()
    wrapped.base_layer = linear()
    lora = live(wrapped)
    for module, quantization in ((quark, "quark"), (awq, "awq"), (lora, None)):
        before = module.owner.kv_b_proj
        with stand_ins([module], quantization):
            assert module.owner.kv_b_proj is before


@pytest.mark.parametrize("draft", [False, True], ids=["decoder", "nextn"])
def test_upstream_requantizes_no_blocks(
    draft: bool, tp1: Ranks, glm: Path, tmp_path: Path, inline_of: Callable[[Path, Path], Path]
) -> None:
    inline = inline_of(glm, tmp_path / "inline")
    online = tp1.run(on_ranks.load, glm, draft=draft)[0]
    assert_same_bits(tp1.run(on_ranks.load_forbidding_requantization, inline, on_ranks.GFX950, draft)[0], online)
    with pytest.raises(AssertionError, match="upstream requantized a weight"):
        tp1.run(on_ranks.load_forbidding_requantization, inline, None, draft)


def test_upstreams_own_cast_is_spared_too(tp1: Ranks, glm: Path) -> None:
    """As on gfx950, where sglang casts GLM's decoder layers itself."""
    assert_same_bits(tp1.run(on_ranks.load_as_on_gfx950, glm)[0], tp1.run(on_ranks.load, glm)[0])
