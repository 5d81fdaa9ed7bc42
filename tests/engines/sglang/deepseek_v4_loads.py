"""Loads of a small DeepSeek-V4 inside a rank, by sglang's own loader, model and weight names, on the CPU.

Three things of the real model ask for a GPU and hold no weight: the rope (the CPU's refuses layers without scaling),
the prewarming of the hyper connection's kernels (off by sglang's own setting) and what fp8 linears repack after the
load. The fourth is aiter's GEMM, whose presence puts weightprep on the direct path; torch's stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import on_ranks
import torch


@dataclass(frozen=True)
class Loaded:
    """Every parameter and buffer of a model by name, the recipe that its plan was of, and weightprep's log."""

    tensors: dict[str, torch.Tensor]
    recipe: str | None
    log: list[str]


@contextmanager
def _without_a_gpu(*, aiter: bool) -> Iterator[None]:
    import sglang.srt.models.deepseek_v4 as deepseek_v4
    from sglang.srt.environ import envs

    from weightprep.engines.sglang import compressor_hooks

    kept = deepseek_v4.get_rope_wrapper, compressor_hooks._aiter_gemm
    deepseek_v4.get_rope_wrapper = lambda *args, **kwargs: torch.nn.Identity()
    if aiter:
        compressor_hooks._aiter_gemm = lambda: torch.nn.functional.linear
    try:
        with envs.SGLANG_OPT_USE_TILELANG_MHC_PRE.override(False):
            yield
    finally:
        deepseek_v4.get_rope_wrapper, compressor_hooks._aiter_gemm = kept


def load(state: Any, path: Path, load_format: str, draft: bool) -> Loaded:
    """The model at `path`, or its NextN draft, through sglang's get_model; one loaded with the flag stays in `state`,
    with its plan.
    """
    from weightprep.engines.sglang import loader

    start = loader.start_compressors
    plans = []

    def watched(model: Any, plan: Any, **options: Any) -> Any:
        plans.append(plan)
        return start(model, plan, **options)

    loader.start_compressors = watched
    extra = {"target": "gfx950"} if load_format == "weightprep" else {}
    try:
        with _without_a_gpu(aiter=True), on_ranks.logged() as log:
            model = on_ranks.load_model_without_amx(state, path, load_format, extra, draft)
    finally:
        loader.start_compressors = start
    for plan in plans:
        state.models[str(path), load_format, draft] = model, plan
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return Loaded(copies, plans[0].recipe.name if plans else None, log)


def start_again(
    state: Any, path: Path, *, widened: str | None = None, aiter: bool = True, on_violation: str = "error"
) -> list[str]:
    """What startup logs of the model that was loaded from `path` with the flag.

    :param widened: name of a compressor whose gate weight is float32 meanwhile
    """
    from weightprep.engines.sglang.compressor_check import start_compressors

    model, plan = state.models[str(path), "weightprep", False]
    gates = [] if widened is None else [model.get_submodule(widened).wkv_gate.weight]
    kept = [gate.data for gate in gates]
    for gate in gates:
        gate.data = gate.data.float()
    try:
        with _without_a_gpu(aiter=aiter), on_ranks.logged() as log:
            start_compressors(model, plan, runtime="auto", on_violation=on_violation, target="gfx950")
    finally:
        for gate, data in zip(gates, kept, strict=True):
            gate.data = data
    return log
