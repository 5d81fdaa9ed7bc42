"""The commands that follow a conversion, with every option without which they would fail or do something else.

They are pasted. A verify line without the recipe's file finds no recipe, and a serve line without the options of the
conversion prepares what was left alone, or nothing.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightprep.convert.options import Layout

if TYPE_CHECKING:
    from weightprep.convert.plan import ConversionPlan

__all__ = ["AITER_SWITCH", "next_steps"]

# What a server on ROCm needs in its environment: without it gfx950 takes none of aiter's kernels. Written out, as the
# module that reads the variable needs torch.
AITER_SWITCH = "SGLANG_USE_AITER=1"


def next_steps(plan: ConversionPlan) -> list[str]:
    """Lines for people: how to verify the result of `plan`, and how to serve it."""
    from weightprep.recipe.load import shipped_architectures

    options = plan.options
    verify = ["weightprep", "verify", str(options.source), str(options.destination)]
    if _is_file(plan):
        verify += ["--recipe", str(options.recipe)]
    if options.allow_quality_loss:
        verify.append("--allow-quality-loss")
    serve = ["sglang", "serve", "--model-path", str(options.destination), "--load-format", "weightprep"]
    if extra := _loader_options(plan):
        serve += ["--model-loader-extra-config", json.dumps(extra)]
    lines = [f"next: {shlex.join(verify)}", f"then: {shlex.join(serve)}"]
    lines.append(f"      on ROCm, before the server starts: export {AITER_SWITCH}")
    if options.layout is Layout.INLINE and plan.model.architecture in shipped_architectures():
        lines.append("      sglang without weightprep loads this checkpoint as well: leave --load-format out")
        if any("scale" not in job.outputs for job in plan.modules):
            lines.append("      it then makes of bf16 weights what it always does, which need not be bf16")
    return lines


def _is_file(plan: ConversionPlan) -> bool:
    """Whether the recipe was given as a file, which a manifest's name does not find."""
    return plan.options.recipe not in (None, plan.model.recipe.name)


def _loader_options(plan: ConversionPlan) -> dict[str, Any]:
    """The keys of --model-loader-extra-config that repeat what the conversion was asked for."""
    options = plan.options
    asked = {
        # a server is seldom started in the folder of the conversion
        "recipe": str(Path(str(options.recipe)).absolute()) if _is_file(plan) else options.recipe,
        "precision": options.precision,
        "nextn": None if options.nextn == "convert" else options.nextn,
    }
    return {key: value for key, value in asked.items() if value is not None}
