"""Every hook inside torch.compile(fullgraph=True), as sglang's piecewise graphs trace the code around it.

What stays with upstream has to compile too: that is where a hook counts in plain Python and not in an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightprep.engines.sglang import runtime_hooks, scale_hooks
from weightprep.runtime import witness
from weightprep.runtime.scale_layout import GroupScaleLayout
from weightprep.runtime.scale_probe import TransposeScale

HEADS, K, N = 2, 512, 128
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ONE = torch.tensor([0.5])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    witness.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    """`function` in one graph, called twice: the second call runs it without tracing."""
    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    graph(*arguments)
    return graph(*arguments)


def weight(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((HEADS, N, K), generator=generator).to(dtype).transpose(1, 2)


def activations(rows: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn((rows, HEADS, K), generator=torch.Generator().manual_seed(2)).to(dtype)


def attention(dtype: torch.dtype, *, lora: bool = False, o_proj: torch.dtype = BF16) -> SimpleNamespace:
    return SimpleNamespace(
        w_kc=weight(dtype),
        w_vc=weight(dtype),
        w_scale=ONE if dtype == FP8 else 1.0,
        o_proj=SimpleNamespace(weight=torch.zeros(1, dtype=o_proj)),
        kv_b_proj=SimpleNamespace(set_lora=lora),
        _weightprep_layer="nextn",
    )


def upstreams(attn: SimpleNamespace, x: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.bmm(x.float().transpose(0, 1), attn.w_kc.float()) * attn.w_scale


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("rows", [4, 65])
def test_rocm_absorb_q(dtype: torch.dtype, rows: int) -> None:
    attn, x = attention(dtype), activations(rows)
    out = compiled(lambda q: runtime_hooks.rocm_absorb_q(upstreams, attn, q, is_capture_mode=False), x)
    assert torch.equal(out.bfloat16(), upstreams(attn, x).bfloat16())
    ours = dtype == FP8 and rows == 4
    assert witness.counts() == ({"absorb/torch/fp8/bf16": 2} if ours else {})


@pytest.mark.parametrize(
    ("attn", "ours"),
    [
        (attention(FP8), True),
        (attention(BF16), True),
        (attention(FP8, o_proj=torch.uint8), True),
        (attention(FP8, lora=True, o_proj=torch.uint8), False),
    ],
    ids=["fp8", "bf16", "mxfp4-o_proj", "lora"],
)
def test_rocm_absorb_v(attn: SimpleNamespace, ours: bool) -> None:
    compiled(lambda x: runtime_hooks.rocm_absorb_v(upstreams, attn, x), activations(4))
    assert sum(witness.counts().values()) == (2 if ours else 0)


def test_fused_rope() -> None:
    x = torch.ones(3)
    assert torch.equal(compiled(lambda y: runtime_hooks.fused_rope(lambda z: z + 1, y), x), x + 1)


@pytest.mark.parametrize("rows", [4, 257])
def test_cuda_bmm_fp8(rows: int) -> None:
    def bmm(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, *_: object) -> torch.Tensor:
        return (torch.bmm(a.float(), b.float()) * a_scale * b_scale).bfloat16()

    a, b = activations(rows, FP8).transpose(0, 1), weight(FP8)
    out = compiled(lambda x: runtime_hooks.cuda_bmm_fp8(bmm, x, b, ONE, ONE, BF16), a)
    assert torch.equal(out, bmm(a, b, ONE, ONE))
    assert witness.counts() == ({"absorb/torch/fp8/bf16": 2} if rows == 4 else {})


@pytest.mark.parametrize("bias", [None, torch.ones(N)], ids=["ours", "upstreams"])
def test_aiter_fp8_kernel(bias: torch.Tensor | None) -> None:
    w = weight(FP8).transpose(1, 2)

    def kernel(x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.bmm(x, w.to(BF16).transpose(1, 2))

    x = activations(4).transpose(0, 1)
    out = compiled(lambda y: runtime_hooks.aiter_fp8_kernel(kernel, y, w, ONE, bias=bias), x)
    assert out.shape == (HEADS, 4, N)
    assert witness.counts() == ({"absorb/torch/fp8/bf16": 2} if bias is None else {})


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["ours", "upstreams"])
def test_aiter_mxfp4_kernel(dtype: torch.dtype) -> None:
    packed = torch.randint(0, 256, (HEADS, N, K // 2), dtype=torch.uint8)
    powers = torch.full((HEADS, N, K // 32), 127, dtype=torch.uint8)

    def kernel(x: torch.Tensor, w: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_zeros((x.shape[0], x.shape[1], w.shape[1]))

    x = activations(4).transpose(0, 1)
    out = compiled(lambda y: runtime_hooks.aiter_mxfp4_kernel(kernel, y, packed, powers, dtype), x)
    assert out.shape == (HEADS, 4, N)
    assert witness.counts() == ({"absorb/torch/mxfp4/bf16": 2} if dtype == BF16 else {})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("producer", "behaviour"),
    [
        (scale_hooks.GROUP, TransposeScale.TRANSPOSED_BYTES),
        (scale_hooks.GROUP, TransposeScale.STRIDED_VIEW),
        (scale_hooks.GROUP, TransposeScale.ROW_ONLY),
        (scale_hooks.RMS, TransposeScale.ROW_ONLY),
    ],
)
def test_scale_hooks(producer: str, behaviour: TransposeScale, rows: int) -> None:
    def quantize(x: torch.Tensor, *, transpose_scale: bool = False, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x[:, ::128].float().contiguous()
        if transpose_scale and behaviour is TransposeScale.STRIDED_VIEW:
            scale = scale.t().contiguous().t()
        elif transpose_scale:
            scale = scale.t().contiguous().view(scale.shape)
        return x.to(FP8), scale

    hooked = scale_hooks._column_major(quantize, producer, behaviour)
    x = activations(rows).flatten(1)
    values, scale = compiled(lambda y: hooked(y, quant_dtype=FP8), x)
    assert values.shape == x.shape
    if producer == scale_hooks.GROUP:
        assert GroupScaleLayout.COLUMN.holds(scale)
