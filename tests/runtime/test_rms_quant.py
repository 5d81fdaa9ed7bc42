"""Group quantization against NumPy and ml_dtypes: bits where rounding alone decides, derived bounds behind the norm."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from weightprep.errors import ContractError
from weightprep.runtime.choice import Backend
from weightprep.runtime.rms_quant import quantize_groups, rms_norm_quantize
from weightprep.runtime.scale_layout import GroupScaleLayout

BACKENDS = [Backend.TRITON, Backend.TORCH]
SHAPES = [(1, 128), (1, 384), (3, 512), (5, 1536), (2, 200), (17, 13), (4, 7168)]
FORMATS = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz}


def oracle(x: np.ndarray, fp8: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales in float32 NumPy, one group at a time."""
    target = FORMATS[fp8]
    top = np.float32(ml_dtypes.finfo(target).max)
    rows, columns = x.shape
    groups = -(-columns // 128)
    q, scale = np.zeros((rows, columns), np.uint8), np.zeros((rows, groups), np.float32)
    for row in range(rows):
        for g in range(groups):
            part = x[row, g * 128 : (g + 1) * 128]
            amax = np.float32(max(np.abs(part).max(), np.float32(1e-10)))
            scale[row, g] = amax / top
            values = np.clip(part * (np.float32(1.0) / scale[row, g]), -top, top)
            q[row, g * 128 : (g + 1) * 128] = values.astype(target).view(np.uint8)
    return q, scale


def raw(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).cpu().numpy()


def activations(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype).to(device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", GroupScaleLayout)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bytes_and_scales_are_exact(
    rows: int, columns: int, layout: GroupScaleLayout, backend: Backend, device: str
) -> None:
    x = activations(rows, columns, torch.bfloat16, device)
    q, scale = quantize_groups(x, layout=layout, backend=backend)
    want_q, want_scale = oracle(x.float().cpu().numpy(), torch.float8_e4m3fn)
    assert layout.holds(scale)
    np.testing.assert_array_equal(scale.cpu().numpy(), want_scale)
    np.testing.assert_array_equal(raw(q), want_q)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fp8", FORMATS, ids=str)
def test_every_input_and_fp8_format(fp8: torch.dtype, dtype: torch.dtype, backend: Backend, device: str) -> None:
    if device == "cuda" and fp8 is torch.float8_e4m3fnuz and backend == "triton":
        pytest.skip("e4m3fnuz is compiled for AMD GPUs alone; here only the interpreter and the reference make it")
    x = activations(6, 288, dtype, device)
    q, scale = quantize_groups(x, fp8=fp8, backend=backend)
    want_q, want_scale = oracle(x.float().cpu().numpy(), fp8)
    np.testing.assert_array_equal(scale.cpu().numpy(), want_scale)
    np.testing.assert_array_equal(raw(q), want_q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_stay_finite_and_nan_stays_nan(backend: Backend, device: str) -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16, device=device)
    x[1, 3] = float("nan")
    x[1, 4] = 2.0
    q, scale = quantize_groups(x, backend=backend)
    assert (raw(q)[0] == 0).all()
    assert scale[0].isfinite().all()
    assert (scale[0] > 0).all()
    assert q[1, 3].float().isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_a_stride_are_read_where_they_lie(backend: Backend, device: str) -> None:
    wide = activations(4, 512, torch.bfloat16, device)
    q, scale = quantize_groups(wide[:, 128:384], backend=backend)
    want_q, want_scale = oracle(wide[:, 128:384].float().cpu().numpy(), torch.float8_e4m3fn)
    np.testing.assert_array_equal(raw(q), want_q)
    np.testing.assert_array_equal(scale.cpu().numpy(), want_scale)


def rms_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", GroupScaleLayout)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rms_norm_is_quantized_within_half_a_step(
    rows: int, columns: int, with_residual: bool, layout: GroupScaleLayout, backend: Backend, device: str
) -> None:
    """Against float64: the float32 norm is good to about 1e-6 of a value, e4m3fn to half an ulp, 2^-4 of it, or of its
    smallest normal 2^-6 steps where it is subnormal."""
    x = activations(rows, columns, torch.bfloat16, device)
    residual = activations(rows, columns, torch.bfloat16, device, seed=1) if with_residual else None
    weight = (1 + 0.2 * torch.randn(columns, generator=torch.Generator().manual_seed(2))).to(device)
    out = rms_norm_quantize(x, weight, 1e-6, residual=residual, keep_normed=True, layout=layout, backend=backend)
    total = x.double().cpu().numpy() + (residual.double().cpu().numpy() if residual is not None else 0)
    want = rms_oracle(total, weight.cpu().numpy(), 1e-6)

    assert layout.holds(out.scale)
    scale = np.repeat(out.scale.double().cpu().numpy(), 128, axis=1)[:, :columns]
    error = np.abs(out.q.float().double().cpu().numpy() * scale - want)
    assert np.all(error <= (2.0**-4 + 1e-5) * np.maximum(np.abs(want), 2.0**-6 * scale))
    amax = [np.abs(want[:, g * 128 : (g + 1) * 128]).max(axis=1) for g in range(out.scale.shape[1])]
    np.testing.assert_allclose(out.scale.cpu().numpy(), np.stack(amax, axis=1) / 448, rtol=2e-6)

    assert out.normed is not None
    # Half an ulp of bf16, and the float32 norm.
    np.testing.assert_allclose(out.normed.float().cpu().numpy(), want, rtol=2.0**-8 + 1e-5)
    if residual is None:
        assert out.residual is None
    else:
        assert out.residual is not None
        assert torch.equal(out.residual, (x.float() + residual.float()).to(torch.bfloat16))


def test_layouts_agree_bit_for_bit(device: str) -> None:
    x = activations(9, 640, torch.bfloat16, device)
    weight = torch.ones(640, device=device)
    row, column = (rms_norm_quantize(x, weight, 1e-6, layout=layout) for layout in GroupScaleLayout)
    assert torch.equal(row.scale, column.scale)
    assert np.array_equal(raw(row.q), raw(column.q))
    assert row.normed is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", GroupScaleLayout)
def test_no_rows_is_an_empty_result(layout: GroupScaleLayout, backend: Backend, device: str) -> None:
    x = torch.empty(0, 256, dtype=torch.bfloat16, device=device)
    q, scale = quantize_groups(x, layout=layout, backend=backend)
    assert q.shape == (0, 256)
    assert scale.shape == (0, 2)
    out = rms_norm_quantize(x, torch.ones(256, device=device), 1e-6, residual=x, layout=layout, backend=backend)
    assert out.q.shape == (0, 256)
    assert out.residual is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_groups(x.int()), "activations: found torch.int32"),
        (lambda x: quantize_groups(x.t()), "activations"),
        (lambda x: quantize_groups(x[0]), "activations"),
        (lambda x: quantize_groups(x, fp8=torch.float8_e5m2), "float8_e5m2"),
        (lambda x: rms_norm_quantize(x, torch.ones(5), 1e-6), "weight"),
        (lambda x: rms_norm_quantize(x, torch.ones(256), 1e-6, residual=x.float()), "residual: found torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: object, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        call(torch.zeros(3, 256, dtype=torch.bfloat16))  # type: ignore[operator]


def test_operators_trace_under_fake_tensors() -> None:
    x, q = torch.randn(2, 256), torch.empty(2, 256, dtype=torch.float8_e4m3fn)
    scale = GroupScaleLayout.COLUMN.empty(2, 2, device="cpu")
    # The schema check compares tensors in a way that torch has no fp8 kernel for.
    checks = ("test_faketensor",)
    torch.library.opcheck(torch.ops.weightprep.quantize_groups.default, (x, q, scale, False), test_utils=checks)
    arguments = (x, torch.ones(256), x, q, scale, None, torch.empty(2, 256), 1e-6, False)
    torch.library.opcheck(torch.ops.weightprep.rms_norm_quantize.default, arguments, test_utils=checks)
