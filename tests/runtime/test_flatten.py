"""flatten_quant against NumPy, bit for bit: values on ties, every exponent, odd sizes, any strides, both layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from absorb_oracle import assert_same_bytes, fp8_groups, mxfp4_groups

from weightprep.errors import ContractError
from weightprep.runtime.flatten import flatten_quant_fp8, flatten_quant_mxfp4
from weightprep.runtime.scale_layout import GroupScaleLayout

BACKENDS = ["torch", "triton"]
LAYOUTS = list(GroupScaleLayout)


def flat(x: torch.Tensor) -> np.ndarray:
    return x.float().flatten(1).cpu().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda s: s.value)
@pytest.mark.parametrize(("m", "heads", "n"), [(1, 2, 256), (3, 1, 128), (17, 3, 384)])
def test_random(m: int, heads: int, n: int, layout: GroupScaleLayout, backend: str, device: str) -> None:
    x = torch.randn((m, heads, n), generator=torch.Generator().manual_seed(m)).bfloat16().to(device)
    for tensor in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        fp8 = flatten_quant_fp8(tensor, scale_layout=layout, backend=backend)
        values, scales = fp8_groups(flat(x))
        assert_same_bytes(fp8.values, values)
        assert_same_bytes(fp8.scales, scales)
        fp4 = flatten_quant_mxfp4(tensor, scale_layout=layout, backend=backend)
        packed, powers = mxfp4_groups(flat(x))
        assert_same_bytes(fp4.values, packed)
        assert_same_bytes(fp4.scales, powers)
        assert layout.holds(fp8.scales)
        assert layout.holds(fp4.scales)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_exponent_and_tie(backend: str, device: str) -> None:
    """amax around the mantissas where libraries differ, over all exponents of float32, with ties in the group."""
    tops = np.array([1.0, 1.2, 1.374, 1.375, 1.5, 1.749, 1.75, 1.751, 1.999])
    exponents = np.arange(-149, 127)
    amax = (tops[None, :] * np.exp2(exponents[:, None].astype(np.float64))).astype(np.float32).reshape(-1, 1)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 0.0, -0.0], np.float64) / 8
    group = np.concatenate([np.ones((1, 1)), np.tile(ties, 3)[None, :31]], axis=1)
    x = torch.from_numpy((amax * group).astype(np.float32)).reshape(1, 1, -1)
    result = flatten_quant_mxfp4(x.to(device), backend=backend)
    packed, powers = mxfp4_groups(x.numpy().reshape(1, -1))
    assert_same_bytes(result.scales, powers)
    assert_same_bytes(result.values, packed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_and_zero_groups(backend: str, device: str) -> None:
    x = torch.zeros((2, 1, 128), device=device, dtype=torch.bfloat16)
    fp4 = flatten_quant_mxfp4(x, backend=backend)
    assert not fp4.values.any()
    assert not fp4.scales.any()
    assert flatten_quant_fp8(x[:0], backend=backend).scales.shape == (0, 1)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ContractError, match="192 columns per head"):
        flatten_quant_fp8(torch.zeros((1, 2, 192)))
    with pytest.raises(ContractError, match="48 columns per head"):
        flatten_quant_mxfp4(torch.zeros((1, 2, 48)))
