"""A spec finds each way in which a tensor can differ from it, and nothing else."""

from __future__ import annotations

import pickle

import pytest
import torch

from weightprep.contracts import ModelContractError, Place, TensorSpec, Violation, raise_violations
from weightprep.errors import ContractError

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
PLACE = Place(
    layer=78,
    group="nextn",
    tensor="self_attn.w_kc",
    path="fp8_absorbed",
    target="gfx950",
    consequence="runs torch.bmm (slow path)",
    cause="the checkpoint stores kv_b_proj in bf16 and recipe X does not list nextn",
    remedy="add 'nextn' to modules.kv_b.on, or run with on_violation=warn",
)
SPEC = TensorSpec(FN, (4, 192, 512), (192 * 512, 1, 192), finite=True)


def good() -> torch.Tensor:
    return torch.ones(4, 512, 192).to(FN).transpose(1, 2)


def found(spec: TensorSpec, tensor: torch.Tensor) -> list[str]:
    return [violation.found for violation in spec.check(tensor, PLACE)]


def test_the_right_tensor_has_no_violation() -> None:
    assert SPEC.check(good(), PLACE) == []


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (good().bfloat16(), ["dtype is bfloat16"]),
        (good().float().to(FNUZ), ["dtype is float8_e4m3fnuz"]),
        (good()[:3], ["shape is (3, 192, 512)"]),
        (good().contiguous(), ["strides are (98304, 512, 1)"]),
        (good().bfloat16()[:2], ["dtype is bfloat16", "shape is (2, 192, 512)"]),
        (good()[0], ["shape is (192, 512)"]),
    ],
)
def test_each_difference_is_found(tensor: torch.Tensor, words: list[str]) -> None:
    assert found(SPEC, tensor) == words


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_in_weights(code: int) -> None:
    tensor = good()
    tensor.view(torch.uint8)[3, 100, 200] = code
    assert found(SPEC, tensor) == ["a value is NaN or infinite"]


def test_0x80_is_nan_only_in_fnuz() -> None:
    tensor = good()
    tensor.view(torch.uint8)[0, 0, 0] = 0x80
    assert found(SPEC, tensor) == []
    assert found(SPEC.on("gfx942"), tensor.view(torch.uint8).view(FNUZ)) == ["a value is NaN or infinite"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.001, []),
        (0.0, ["a value is not positive"]),
        (-1.0, ["a value is not positive"]),
        (float("nan"), ["a value is NaN or infinite"]),
        (float("inf"), ["a value is NaN or infinite"]),
    ],
)
def test_scales(value: float, words: list[str]) -> None:
    assert found(TensorSpec(torch.float32, (), finite=True, positive=True), torch.tensor(value)) == words


def test_a_scale_for_each_head_is_no_scale_for_the_tensor() -> None:
    spec = TensorSpec(torch.float32, (), finite=True, positive=True)
    assert found(spec, torch.ones(4, 1, 1)) == ["shape is (4, 1, 1)"]


def test_e8m0_scales() -> None:
    spec = TensorSpec(torch.uint8, (2, 3), finite=True)
    assert found(spec, torch.full((2, 3), 254, dtype=torch.uint8)) == []
    assert found(spec, torch.tensor([[0, 1, 2], [3, 255, 5]], dtype=torch.uint8)) == ["a value is NaN or infinite"]


def test_the_stride_of_a_single_head_does_not_matter() -> None:
    one = torch.ones(3, 512, 192).to(FN).transpose(1, 2)[::2][:1]
    assert one.stride() != (192 * 512, 1, 192)
    assert found(TensorSpec(FN, (1, 192, 512), (192 * 512, 1, 192)), one) == []


def test_fn_becomes_fnuz_on_gfx942_only() -> None:
    assert SPEC.on("gfx942").dtype is FNUZ
    assert SPEC.on("gfx950") == SPEC
    assert TensorSpec(torch.bfloat16, ()).on("gfx942").dtype is torch.bfloat16


def test_the_report_has_all_parts_in_order() -> None:
    (violation,) = SPEC.check(good().bfloat16(), PLACE)
    assert str(violation) == (
        "layer 78 (nextn) self_attn.w_kc: dtype is bfloat16, path 'fp8_absorbed' on gfx950 needs float8_e4m3fn\n"
        "  -> runs torch.bmm (slow path). "
        "Cause: the checkpoint stores kv_b_proj in bf16 and recipe X does not list nextn.\n"
        "  -> add 'nextn' to modules.kv_b.on, or run with on_violation=warn"
    )


def test_all_violations_are_raised_once() -> None:
    violations = SPEC.check(good().bfloat16()[:2], PLACE)
    with pytest.raises(ContractError) as caught:
        raise_violations(violations)
    assert isinstance(caught.value, ModelContractError)
    assert caught.value.violations == tuple(violations)
    assert caught.value.exit_code == 1
    text = str(caught.value)
    assert text.startswith("2 contract violations\n")
    assert all(str(violation) in text for violation in violations)
    raise_violations([])


def test_the_report_survives_the_way_between_processes() -> None:
    error = ModelContractError(SPEC.check(good().bfloat16()[:2], PLACE))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.violations) == (str(error), error.violations)


def test_violations_are_values() -> None:
    (violation,) = SPEC.check(good().bfloat16(), PLACE)
    assert isinstance(violation, Violation)
    with pytest.raises(AttributeError):
        violation.layer = "other"  # type: ignore[misc]
