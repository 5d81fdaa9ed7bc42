"""Refuses precisions that an engine's kernels would misread on a target, before any weight is read.

The tensors of a contract have dtypes, and gates compare dtypes: what a kernel would take a tensor for can be told from
the two alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightprep.contracts import predict
from weightprep.errors import RecipeError
from weightprep.recipe.plan import ModelPlan

__all__ = ["gate_attributes", "refuse_unsound"]


def gate_attributes(model: ModelPlan, contract: str, target: str) -> Mapping[str, str]:
    """What gates see of a layer that keeps `contract`: dtype names by role, and "tensor" or "float" for w_scale."""
    specs = model.contract(contract, target=target)
    attributes = {role: str(spec.dtype).removeprefix("torch.") for role, spec in specs.items()}
    return attributes | {"w_scale": "tensor" if "w_scale" in specs else "float"}


def refuse_unsound(model: ModelPlan, target: str, version: str, *, aiter: bool = True) -> None:
    """Make sure that no kernel of sglang `version` on `target` misreads what `model` plans.

    :param aiter: whether sglang takes aiter's kernels, see SGLANG_USE_AITER
    :raises RecipeError: one would; its result would be wrong, or the call would fail
    """
    for precision, contract in sorted({(plan.precision, plan.contract) for plan in model.modules}):
        if "w_kc" not in model.recipe.contracts[contract]:
            continue
        attributes = gate_attributes(model, contract, target)
        prediction = predict(target, version, {**attributes, "aiter": "on" if aiter else "off"})
        if not prediction.sound:
            switch = "" if aiter or not predict(target, version, attributes).sound else "export SGLANG_USE_AITER=1, or "
            raise RecipeError(
                f"precision {precision} on {target}, sglang {version}",
                found=prediction.reason,
                wanted="a precision that the kernels of this target read",
                remedy=f"{switch}choose another --precision; docs/contracts.md says what each target reads",
            )
