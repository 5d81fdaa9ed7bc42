"""absorb_q and absorb_v against float64; quantized output bit for bit against their own bf16 output."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from absorb_oracle import (
    Weight,
    assert_close,
    assert_same_bytes,
    fp8_groups,
    mxfp4_groups,
    to_float64,
)

from weightprep.errors import ContractError
from weightprep.runtime import witness
from weightprep.runtime.absorb import absorb_into, absorb_q, absorb_v
from weightprep.runtime.choice import ActQuant, Backend, OutQuant, Quantized
from weightprep.runtime.scale_layout import GroupScaleLayout

KINDS = ["e4m3fn", "e4m3fnuz", "mxfp4", "bf16"]
BACKENDS = [Backend.TORCH, Backend.TRITON]


def activations(m: int, heads: int, k: int, device: str) -> torch.Tensor:
    return torch.randn((m, heads, k), generator=torch.Generator().manual_seed(m + 1)).bfloat16().to(device)


def needs(kind: str, backend: Backend, device: str) -> None:
    if kind == "e4m3fnuz" and backend is Backend.TRITON and device == "cuda" and torch.version.hip is None:
        pytest.skip("NVIDIA GPUs have no e4m3fnuz; Triton on them is not covered")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "k", "n"), [(2, 192, 512), (3, 128, 512)], ids=["glm", "deepseek"])
@pytest.mark.parametrize("m", [1, 3, 17])
def test_absorb_q(m: int, heads: int, k: int, n: int, kind: str, backend: Backend, device: str) -> None:
    needs(kind, backend, device)
    weight = Weight.make(kind, heads, k, n, device)
    x = activations(m, heads, k, device)
    head_major = absorb_q(x, weight.w, weight.scale, mx_scale=weight.mx_scale, backend=backend)
    batch_major = absorb_q(x, weight.w, weight.scale, mx_scale=weight.mx_scale, backend=backend, head_major=False)
    assert head_major.shape == (heads, m, n)
    assert head_major.is_contiguous()
    assert batch_major.is_contiguous()
    assert torch.equal(head_major.transpose(0, 1), batch_major)
    assert_close(batch_major, x, weight)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("layout", list(GroupScaleLayout), ids=lambda s: s.value)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [256, 128])
@pytest.mark.parametrize("m", [1, 2, 17])
def test_absorb_v_quantizes_its_own_bf16_output_bit_for_bit(
    m: int, n: int, kind: str, layout: GroupScaleLayout, backend: Backend, device: str
) -> None:
    needs(kind, backend, device)
    heads, k = 2, 512
    weight = Weight.make(kind, heads, k, n, device)
    x = activations(m, heads, k, device)
    arguments = {"mx_scale": weight.mx_scale, "backend": backend, "act_quant": ActQuant.NONE}
    plain = absorb_v(x, weight.w, weight.scale, **arguments)
    assert_close(plain, x, weight)
    flat = plain.flatten(1, 2)
    assert flat.data_ptr() == plain.data_ptr(), "flattening heads copied"
    assert flat.stride() == (heads * n, 1)

    exact = to_float64(flat).astype(np.float32)
    values, scales = absorb_v(x, weight.w, weight.scale, out_quant=OutQuant.FP8_GROUP, scale_layout=layout, **arguments)
    wanted_values, wanted_scales = fp8_groups(exact)
    assert_same_bytes(values, wanted_values)
    assert_same_bytes(scales, wanted_scales)
    assert layout.holds(scales)

    packed, powers = absorb_v(x, weight.w, weight.scale, out_quant=OutQuant.MXFP4, scale_layout=layout, **arguments)
    wanted_packed, wanted_powers = mxfp4_groups(exact)
    assert_same_bytes(packed, wanted_packed)
    assert_same_bytes(powers, wanted_powers)
    assert layout.holds(powers)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_fnuz_output_has_its_own_top(backend: Backend, device: str) -> None:
    needs("e4m3fnuz", backend, device)
    weight = Weight.make("e4m3fnuz", 2, 512, 128, device)
    x = activations(3, 2, 512, device)
    plain = absorb_v(x, weight.w, weight.scale, backend=backend)
    result = absorb_v(
        x, weight.w, weight.scale, out_quant=OutQuant.FP8_GROUP, fp8_dtype=torch.float8_e4m3fnuz, backend=backend
    )
    assert isinstance(result, Quantized)
    values, scales = fp8_groups(to_float64(plain).astype(np.float32).reshape(3, -1), ml_dtypes.float8_e4m3fnuz, 240.0)
    assert_same_bytes(result.values, values)
    assert_same_bytes(result.scales, scales)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("k", [512, 192])
def test_quantized_activations_are_upstreams(k: int, backend: Backend, device: str) -> None:
    weight = Weight.make("e4m3fn", 2, k, 256, device)
    x = activations(5, 2, k, device)
    padded = np.zeros((5, 2, -(-k // 128) * 128), np.float32)
    padded[..., :k] = to_float64(x)
    values, scales = fp8_groups(padded.reshape(10, -1))
    quantized = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(scales, 128, axis=1)
    exact = torch.from_numpy(quantized.reshape(padded.shape)[..., :k])
    out = absorb_v(x, weight.w, weight.scale, act_quant=ActQuant.GROUP, backend=backend)
    assert_close(out, exact, weight)
    assert not torch.equal(out, absorb_v(x, weight.w, weight.scale, act_quant=ActQuant.NONE, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_any_strides(backend: Backend, device: str) -> None:
    """Slices of wider tensors, heads first in memory, and a weight that is contiguous the other way."""
    weight = Weight.make("e4m3fn", 3, 192, 256, device)
    wide = torch.full((3, 5, 448), float("nan"), device=device, dtype=torch.bfloat16)
    x = wide.transpose(0, 1)[:, :, 64:256]
    x.copy_(activations(5, 3, 192, device))
    other_way = weight.w.contiguous()
    assert other_way.stride() != weight.w.stride()
    first = absorb_v(x, weight.w, weight.scale, backend=backend)
    assert_close(first, x, weight)
    assert_close(absorb_v(x, other_way, weight.scale, backend=backend), x, weight)


@pytest.mark.parametrize("out_quant", list(OutQuant), ids=lambda q: q.value)
def test_no_rows_give_empty_outputs_of_the_right_shape(out_quant: OutQuant, device: str) -> None:
    weight = Weight.make("e4m3fn", 2, 512, 256, device)
    x = activations(1, 2, 512, device)[:0]
    result = absorb_v(x, weight.w, weight.scale, out_quant=out_quant)
    values = result.values if isinstance(result, Quantized) else result
    assert values.shape[0] == 0
    one = absorb_v(activations(1, 2, 512, device), weight.w, weight.scale, out_quant=out_quant)
    assert values.shape[1:] == (one.values if isinstance(one, Quantized) else one).shape[1:]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_rows_of_zeros_and_of_nan(backend: Backend, device: str) -> None:
    """A row of zeros gets the floor as its scale; NaN of one row stays in that row."""
    weight = Weight.make("e4m3fn", 2, 512, 128, device)
    x = activations(3, 2, 512, device)
    x[0] = 0
    x[2, 1, 7] = float("nan")
    values, scales = absorb_v(x, weight.w, weight.scale, out_quant=OutQuant.FP8_GROUP, backend=backend)
    assert torch.equal(scales[0].cpu(), torch.full((2,), 1e-10) / torch.full((2,), 448.0))
    assert (values[0].float() == 0).all()
    assert not values[1].isnan().any()
    assert not values[2, :128].float().isnan().any()
    assert values[2, 128:].float().isnan().all()


def test_scale_may_be_zero_dimensional(device: str) -> None:
    weight = Weight.make("e4m3fn", 2, 512, 128, device)
    x = activations(2, 2, 512, device)
    assert weight.scale is not None
    for backend in BACKENDS:
        assert torch.equal(
            absorb_v(x, weight.w, weight.scale, backend=backend),
            absorb_v(x, weight.w, weight.scale.reshape(()), backend=backend),
        )


def test_mxfp4_scales_at_the_ends(device: str) -> None:
    """Byte 0 is 2^-127, 254 is 2^127, 255 is NaN; a shift by 23 gets the first and the last wrong."""
    packed = torch.full((1, 128, 16), 0x22, dtype=torch.uint8)
    mx = torch.full((1, 128, 1), 127, dtype=torch.uint8)
    mx[0, 0], mx[0, 1], mx[0, 2] = 0, 254, 255
    x = torch.zeros((1, 1, 32))
    x[0, 0, 0], x[0, 0, 1] = 2.0**100, 2.0**-20
    for backend in BACKENDS:
        out = absorb_v(
            x.bfloat16().to(device),
            packed.transpose(1, 2).to(device),
            mx_scale=mx.transpose(1, 2).to(device),
            backend=backend,
        )
        assert out[0, 0, 0].item() == 2.0**-27
        assert out[0, 0, 1].isinf() or out[0, 0, 1].item() > 1e38
        assert out[0, 0, 2].isnan()


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"out_quant": OutQuant.FP8_GROUP, "n": 192}, "fp8_group output"),
        ({"out_quant": OutQuant.MXFP4, "n": 48}, "mxfp4 output"),
        ({"scale": torch.ones(2)}, "scale of an fp8 weight"),
        ({"scale": torch.ones(1, dtype=torch.float64)}, "scale of an fp8 weight"),
        ({"scale": None}, "scale of an fp8 weight"),
        ({"heads": 3}, "absorb: weight"),
        ({"act_quant": ActQuant.NONE, "backend": Backend.CUDA}, "backend 'cuda'"),
        ({"out_quant": OutQuant.FP8_GROUP, "backend": Backend.AITER}, "backend 'aiter'"),
    ],
    ids=["v-192", "v-48", "scale-per-head", "scale-float64", "no-scale", "heads", "cuda-on-cpu", "aiter-epilogue"],
)
def test_refuses(change: dict[str, object], subject: str) -> None:
    n = int(change.pop("n", 256))
    weight = Weight.make("e4m3fn", 2, 512, n, "cpu")
    scale = change.pop("scale", weight.scale)
    x = activations(2, int(change.pop("heads", 2)), 512, "cpu")
    with pytest.raises(ContractError, match=subject):
        absorb_v(x, weight.w, scale, **change)


@pytest.mark.parametrize("backend", list(Backend), ids=lambda b: b.value)
def test_fp8_activations_take_the_named_backend_or_none(backend: Backend, device: str) -> None:
    weight = Weight.make("e4m3fn", 2, 512, 128, device)
    x = activations(3, 2, 512, device).to(torch.float8_e4m3fn)
    x_scale = torch.tensor([0.25], device=device)
    out = torch.full((3, 2, 128), float("nan"), dtype=torch.bfloat16, device=device)
    witness.reset()
    if backend in (Backend.CUDA, Backend.AITER):
        with pytest.raises(ContractError, match=f"backend '{backend.value}'"):
            absorb_into(out, x, weight.w, weight.scale, x_scale=x_scale, backend=backend)
        assert not witness.counts()
        return
    absorb_into(out, x, weight.w, weight.scale, x_scale=x_scale, backend=backend)
    default = "triton" if device == "cuda" else "torch"
    taken = default if backend is Backend.AUTO else backend.value
    assert witness.counts() == {f"absorb/{taken}/fp8/bf16": 1}
    # a power of two is exact
    assert_close(out, x.float() * 0.25, weight)


def test_witness_counts_the_path_taken() -> None:
    weight = Weight.make("e4m3fn", 2, 512, 128, "cpu")
    x = activations(2, 2, 512, "cpu")
    witness.reset()
    absorb_v(x, weight.w, weight.scale, backend=Backend.TORCH)
    absorb_v(x, weight.w, weight.scale, backend=Backend.TRITON, out_quant=OutQuant.FP8_GROUP)
    assert witness.counts() == {"absorb/torch/fp8/bf16": 1, "absorb/triton/fp8/fp8_group": 1}


@pytest.mark.parametrize("out_quant", list(OutQuant), ids=lambda q: q.value)
@pytest.mark.parametrize("layout", list(GroupScaleLayout), ids=lambda s: s.value)
def test_fake_has_the_shapes_and_strides_of_the_real_one(out_quant: OutQuant, layout: GroupScaleLayout) -> None:
    weight = Weight.make("e4m3fn", 2, 512, 256, "cpu")
    x = activations(3, 2, 512, "cpu")
    real = torch.ops.weightprep.absorb(
        x, weight.w, weight.scale, None, None, out_quant.value, layout.value == "column", False, False, "auto", "torch"
    )
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.weightprep.absorb(
            mode.from_tensor(x),
            mode.from_tensor(weight.w),
            mode.from_tensor(weight.scale),
            None,
            None,
            out_quant.value,
            layout.value == "column",
            False,
            False,
            "auto",
            "torch",
        )
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_compiles_without_a_graph_break() -> None:
    weight = Weight.make("e4m3fn", 2, 512, 256, "cpu")

    def layer(x: torch.Tensor) -> torch.Tensor:
        return absorb_v(x + 1, weight.w, weight.scale, backend=Backend.TORCH).flatten(1, 2) * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for m in (2, 5):
        x = activations(m, 2, 512, "cpu")
        assert torch.equal(compiled(x), layer(x))
