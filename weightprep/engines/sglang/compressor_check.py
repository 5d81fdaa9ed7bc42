"""At startup: puts a DeepSeek-V4 model's compressors on the direct path, checks their gate weights, and says what came
of it.

Such a model has no absorbed weights to prepare, so the table of the other models would be empty. What there is to know
is how many compressors run without a widening pass, or why none does.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from weightprep.contracts import raise_violations
from weightprep.engines.sglang.compressor_hooks import (
    CompressorPath,
    compressor_violations,
    compressors,
    register_compressor_hooks,
)
from weightprep.errors import EngineError

__all__ = ["start_compressors"]

logger = logging.getLogger(__name__)


def start_compressors(model: torch.nn.Module, *, runtime: str, on_violation: str, target: str) -> CompressorPath:
    """Hook, check and report; call it after the weights are loaded and before graphs are captured.

    :param runtime: the plugin's option; "upstream" leaves the compressors alone
    :param on_violation: "error" or "warn"
    :param target: name of the hardware target, for messages
    :raises EngineError: `model` has no compressors, or online compress is on, or a hook did not take
    :raises ModelContractError: gate weights in another dtype than bf16 where the direct path is on
    """
    found = Counter(module.ratio for _, module in compressors(model))
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
    violations = compressor_violations(model, target) if path.direct else []
    if on_violation == "warn":
        for violation in violations:
            logger.warning("weightprep: %s", violation)
    else:
        raise_violations(violations)
    return path
