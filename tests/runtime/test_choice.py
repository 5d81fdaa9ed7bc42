"""The choices of a call are given as members of an enum or as their values; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from absorb_oracle import Weight

from weightprep.errors import ContractError
from weightprep.runtime.absorb import absorb_into, absorb_q, absorb_v
from weightprep.runtime.choice import ActQuant, Backend, OutQuant, Quantized
from weightprep.runtime.compress import compress_decode, compress_prefill
from weightprep.runtime.flatten import flatten_quant_fp8, flatten_quant_mxfp4
from weightprep.runtime.rms_quant import RmsQuantized, quantize_groups, rms_norm_quantize
from weightprep.runtime.scale_layout import GroupScaleLayout, materialize, with_true_strides
from weightprep.runtime.scale_probe import ScaleProducer, TransposeScale

COLUMN = GroupScaleLayout.COLUMN
WEIGHT = Weight.make("e4m3fn", 2, 512, 256, "cpu")
X = torch.randn((3, 2, 512), generator=torch.Generator().manual_seed(0)).bfloat16()
HEADS, ROWS, ONES = X[..., :256], X.flatten(1), torch.ones(1024)
SCALE = torch.arange(6.0).view(3, 2)
PAIR = (ROWS, SCALE)


def into(out_of: torch.Tensor, **choice: Any) -> torch.Tensor:
    out = torch.empty((3, 2, 256), dtype=torch.bfloat16)
    absorb_into(out, out_of, WEIGHT.w, WEIGHT.scale, **choice)
    return out


def decode(**choice: Any) -> torch.Tensor:
    state, plan = torch.zeros((1, 128, 64)), torch.zeros((1, 16), dtype=torch.uint8)
    return compress_decode(state, torch.ones(1, 64), torch.ones(128, 32), plan, ratio=128, **choice)


def prefill(**choice: Any) -> torch.Tensor:
    plans = torch.zeros((0, 16), dtype=torch.uint8), torch.zeros((0, 8), dtype=torch.uint8)
    return compress_prefill(
        torch.zeros((1, 128, 64)), torch.ones(1, 64), torch.ones(128, 32), *plans, ratio=128, **choice
    )


absorbed_v = partial(absorb_v, X, WEIGHT.w, WEIGHT.scale)
grouped_v = partial(absorbed_v, out_quant=OutQuant.FP8_GROUP)
absorbed_q = partial(absorb_q, X, WEIGHT.w, WEIGHT.scale)
CALLS: list[tuple[str, Callable[..., Any], Any]] = [
    ("out_quant", absorbed_v, OutQuant.MXFP4),
    ("scale_layout", grouped_v, COLUMN),
    ("act_quant", absorbed_v, ActQuant.GROUP),
    ("backend", absorbed_v, Backend.TORCH),
    ("act_quant", absorbed_q, ActQuant.GROUP),
    ("backend", absorbed_q, Backend.TORCH),
    ("backend", partial(into, X), Backend.TORCH),
    ("scale_layout", partial(flatten_quant_fp8, HEADS), COLUMN),
    ("backend", partial(flatten_quant_fp8, HEADS), Backend.TORCH),
    ("scale_layout", partial(flatten_quant_mxfp4, HEADS), COLUMN),
    ("backend", partial(flatten_quant_mxfp4, HEADS), Backend.TORCH),
    ("layout", partial(quantize_groups, ROWS), COLUMN),
    ("backend", partial(quantize_groups, ROWS), Backend.TORCH),
    ("layout", partial(rms_norm_quantize, ROWS, ONES, 1e-6), COLUMN),
    ("backend", partial(rms_norm_quantize, ROWS, ONES, 1e-6), Backend.TORCH),
    ("backend", decode, Backend.TORCH),
    ("backend", prefill, Backend.TORCH),
    ("layout", partial(materialize, SCALE), COLUMN),
    ("stored", partial(with_true_strides, SCALE), COLUMN),
    ("layout", ScaleProducer(lambda: PAIR, TransposeScale.ROW_ONLY), COLUMN),
]


def tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, RmsQuantized):
        return [result.q, result.scale]
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize(("argument", "call", "choice"), CALLS)
def test_a_value_is_as_good_as_the_member(argument: str, call: Callable[..., Any], choice: Any) -> None:
    as_member, as_value = (tensors(call(**{argument: given})) for given in (choice, choice.value))
    for first, second in zip(as_member, as_value, strict=True):
        assert first.stride() == second.stride()
        # bytes, since what is not written may be NaN
        if argument != "backend":
            assert torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
    if choice is COLUMN:
        assert as_value[-1].stride() == (1, 3)


@pytest.mark.parametrize(("argument", "call", "choice"), CALLS)
@pytest.mark.parametrize("given", ["COLUMN", "tritton", None])
def test_anything_else_is_refused(argument: str, call: Callable[..., Any], choice: Any, given: object) -> None:
    with pytest.raises(ContractError, match=f"^{argument}: found {given!r}; wanted .*'{choice.value}'"):
        call(**{argument: given})


def test_a_likely_slip_is_named() -> None:
    with pytest.raises(ContractError, match="did you mean 'triton'"):
        absorbed_v(backend="tritton")


def test_a_value_compiles_without_a_graph_break() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        result = absorb_v(x + 1, WEIGHT.w, WEIGHT.scale, out_quant="fp8_group", scale_layout="column", backend="torch")
        assert isinstance(result, Quantized)
        return result.scales * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), layer(X))
    assert compiled(X).stride() == (1, 3)


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"scale": 0.0123}, "absorb: scale: found the float 0.0123; wanted a tensor"),
        ({"x_scale": 0.25}, "absorb: x_scale: found the float 0.25; wanted a tensor"),
        ({"x_scale": torch.ones(3)}, r"absorb: scale of fp8 activations: found \(3,\)"),
        ({"x_scale": torch.ones(1, dtype=torch.float64)}, "absorb: scale of fp8 activations: found .*float64"),
    ],
    ids=["scale", "x_scale", "three", "float64"],
)
def test_a_scale_that_is_not_one_float32_is_refused(change: dict[str, Any], subject: str) -> None:
    operands: dict[str, Any] = {"scale": WEIGHT.scale, "x_scale": torch.ones(1)} | change
    out = torch.empty((3, 2, 256), dtype=torch.bfloat16)
    with pytest.raises(ContractError, match=subject):
        absorb_into(out, X.to(torch.float8_e4m3fn), WEIGHT.w, **operands)


@pytest.mark.parametrize("quantize", [flatten_quant_fp8, flatten_quant_mxfp4])
def test_flattening_wants_heads(quantize: Callable[..., Any]) -> None:
    with pytest.raises(ContractError, match=r"flatten: activations: found \(3, 1024\); wanted \(M, H, N\)"):
        quantize(ROWS)
