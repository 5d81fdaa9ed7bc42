"""At startup: puts a DeepSeek-V4 model's compressors on the direct path, checks their tensors against the recipe's
contracts, and says what came of it.

Such a model has no absorbed weights to prepare, so the table of the other models would be empty. What there is to know
is how many compressors run without a widening pass, or why none does.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from weightprep.contracts import Place, Violation, raise_violations
from weightprep.engines.sglang.compressor_hooks import GATE_PATH, CompressorPath, register_compressor_hooks
from weightprep.engines.sglang.modules import is_nextn_draft
from weightprep.errors import EngineError
from weightprep.recipe import ModelPlan

__all__ = ["compressor_violations", "start_compressors"]

logger = logging.getLogger(__name__)


def start_compressors(
    model: torch.nn.Module, plan: ModelPlan, *, runtime: str, on_violation: str, target: str
) -> CompressorPath:
    """Hook, check and report; call it after the weights are loaded and before graphs are captured.

    :param plan: of the recipe with the contracts `compressor_ratio_*` and `indexer_compressor_ratio_*`
    :param runtime: the plugin's option; "upstream" leaves the compressors alone
    :param on_violation: "error" or "warn"
    :param target: name of the hardware target, for messages
    :raises EngineError: `model` has no compressors, or online compress is on, or a hook did not take
    :raises ModelContractError: a tensor breaks its contract where the direct path is on
    """
    found = Counter(module.ratio for _, module in _compressors(model))
    if not found and is_nextn_draft(model):
        # a draft: its one layer attends to every token
        path = CompressorPath(False, "the NextN layer has no compressor")
        logger.info("weightprep: %s on %s: %s", type(model).__name__, target, path.reason)
        return path
    if not found:
        raise EngineError(
            type(model).__name__,
            found="a model without compressors",
            wanted="DeepSeek-V4, whose recipe has nothing else to prepare",
            remedy="serve this model without --load-format weightprep",
        )
    if runtime == "upstream":
        path = CompressorPath(False, "the option runtime is upstream")
    else:
        path = register_compressor_hooks()
    kinds = ", ".join(f"{count} of ratio {ratio}" for ratio, count in sorted(found.items()))
    name = "compressor direct (fast)" if path.direct else "compressor as upstream"
    logger.info("weightprep: %s on %s: %s: %s; %s", type(model).__name__, target, kinds, name, path.reason)
    violations = compressor_violations(model, plan, target) if path.direct else []
    if on_violation == "warn":
        for violation in violations:
            logger.warning("weightprep: %s", violation)
    else:
        raise_violations(violations)
    return path


def compressor_violations(model: torch.nn.Module, plan: ModelPlan, target: str) -> list[Violation]:
    """What of the compressors of `model` differs from the contracts of `plan`.

    A gate weight in another dtype than bf16 keeps the widening pass; one in GGUF is read by a kernel of its own and not
    looked at.
    """
    violations: list[Violation] = []
    for name, module in _compressors(model):
        contract = f"{'indexer_' if module.is_in_indexer else ''}compressor_ratio_{module.ratio}"
        tensors = {"wkv_gate": getattr(module.wkv_gate, "weight", None), "ape": module.ape}
        for role, spec in plan.contract(contract, 1, target).items():
            place = Place(
                layer=module.layer_id,
                group=name,
                tensor=role,
                path=GATE_PATH,
                target=target,
                consequence="the score is computed in float32, or widened in a kernel of its own",
                cause="the tensor was loaded in another form than the checkpoint's",
                remedy="leave the compressor's wkv, wgate and ape as the checkpoint has them, or on_violation=warn",
            )
            if tensors[role] is not None:
                violations.extend(spec.check(tensors[role].detach(), place))
    return violations


def _compressors(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from sglang.srt.layers.attention.dsv4.compressor import Compressor

    return [(name, module) for name, module in model.named_modules() if isinstance(module, Compressor)]
