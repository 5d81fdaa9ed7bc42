"""At startup: puts the absorbed products of the runtime that was asked for in place, and says whose they now are.

A hook that is not there makes no error: the product of sglang's own kernel is right, and its copy behind V is back.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass

import torch

from weightprep.engines.sglang.runtime_hooks import refuse_other_runtime, register_runtime_hooks
from weightprep.errors import EngineError

__all__ = ["RuntimeReport", "refuse_runtime", "start_runtime"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """Whose absorbed products run.

    :param asked: the plugin's option
    :param hooks: dotted names of sglang's functions that weightprep's are around; none where sglang's run
    :param reason: what decided it
    """

    asked: str
    hooks: tuple[str, ...]
    reason: str


def refuse_runtime(runtime: str) -> None:
    """Asked before a load, because it takes no weights to know.

    :raises EngineError: aiter was named and is not installed, or the process has a model with another runtime
    """
    if runtime == "aiter" and importlib.util.find_spec("aiter") is None:
        raise EngineError(
            "--model-loader-extra-config: runtime",
            found="'aiter', which is not installed here",
            wanted="a runtime whose kernels are installed",
            remedy='install aiter, or leave runtime out: {"runtime": "auto"} takes what there is',
        )
    refuse_other_runtime(runtime)


def start_runtime(runtime: str) -> RuntimeReport:
    """Hook the running sglang and log what came of it; calling it again changes nothing.

    :raises EngineError: a hook did not take, or a model of this process was loaded with another runtime
    """
    hooks = tuple(hook.target for hook in register_runtime_hooks(runtime))
    if hooks:
        names = ", ".join(name.rpartition(".")[2] for name in hooks)
        report = RuntimeReport(runtime, hooks, f"hooks on {names}")
        logger.info("weightprep: absorbed V batch-major by weightprep, runtime %s: %s", runtime, report.reason)
        return report
    if runtime == "upstream":
        reason = "the option runtime is upstream"
    elif not torch.cuda.is_available():
        reason = "no GPU, whose functions are the ones that are hooked"
    else:
        reason = "this sglang has, or has bound, none of the functions that are hooked"
    logger.info("weightprep: absorbed products as sglang's own: %s", reason)
    return RuntimeReport(runtime, (), reason)
