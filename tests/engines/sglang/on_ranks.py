"""Functions that tests run inside the ranks; each takes the rank's state first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import live_sglang
import torch
import torch.distributed as dist
from live_sglang import Absorbed

GFX950 = {"target": "gfx950"}


def load(
    state: Any, path: Path, load_format: str = "weightprep", extra: dict[str, Any] | None = None, draft: bool = False
) -> dict[int, Absorbed]:
    """Absorbed weights of the model at `path`, which is kept in state.models under (path, load_format, draft)."""
    model = _load(state, path, load_format, GFX950 if extra is None and load_format == "weightprep" else extra, draft)
    state.models[str(path), load_format, draft] = model
    return live_sglang.absorbed(model)


def _load(state: Any, path: Path, load_format: str, extra: dict[str, Any] | None, draft: bool) -> Any:
    from sglang.srt.runtime_context import get_model

    args = live_sglang.server_args(str(path), **state.server)
    with get_model().override(model_path=str(path)):
        return live_sglang.load(args, load_format, extra, draft)


def load_beside_another_runtime(state: Any, path: Path, loaded: str, asked: str) -> None:
    """A load with runtime `asked` in a process that has a model with runtime `loaded`."""
    from weightprep.engines.sglang import runtime_hooks

    runtime_hooks._runtime = loaded
    try:
        _load(state, path, "weightprep", GFX950 | {"runtime": asked}, draft=False)
    finally:
        runtime_hooks._runtime = None


def load_target_and_draft(
    state: Any, path: Path, target_format: str, draft_format: str | None, draft_path: Path | None = None
) -> tuple[dict[int, Absorbed], dict[int, Absorbed]]:
    """A model and then its draft (NextN, or the one at `draft_path`), by sglang's own rule for a draft's load format.

    Both get the one extra config. The CPU engine has no speculation, so the draft worker around this rule and this
    load does not run.
    """
    from types import SimpleNamespace
    from unittest import mock

    from sglang.srt import runtime_context
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_spec

    from weightprep.engines.sglang import plugin

    asked = {"load_format": target_format, "speculative_draft_load_format": draft_format}
    args = live_sglang.server_args(str(path), **state.server, **asked)
    # as in a process of its own, whose first model this is
    with (
        mock.patch.object(plugin, "_was_asked", False),
        mock.patch.object(runtime_context, "get_server_args", return_value=args),
    ):
        target = live_sglang.absorbed(_load(state, path, target_format, GFX950, draft=False))
        with get_spec().override(speculative_draft_load_format=draft_format):
            own = ModelRunner._resolve_draft_load_format(SimpleNamespace(is_draft_worker=True))
        draft = _load(state, draft_path or path, own or target_format, GFX950, draft=True)
        return target, live_sglang.absorbed(draft)


def load_with_upstreams_cast(state: Any, path: Path, draft: bool = False) -> dict[int, Absorbed]:
    """What sglang's own load-time cast for gfx950 makes, without the plugin's flag."""
    import sglang.srt.models.deepseek_common.deepseek_weight_loader as upstream

    upstream._use_aiter_gfx95 = True
    try:
        return live_sglang.absorbed(_load(state, path, "auto", None, draft))
    finally:
        upstream._use_aiter_gfx95 = False


def load_without_amx(
    state: Any, path: Path, load_format: str, extra: dict[str, Any], draft: bool = False, keep: bool = False
) -> dict[int, Absorbed]:
    """Absorbed weights of `load_model_without_amx`."""
    model = load_model_without_amx(state, path, load_format, extra, draft)
    if keep:
        state.models[str(path), load_format, draft] = model
    return live_sglang.absorbed(model)


def load_model_without_amx(state: Any, path: Path, load_format: str, extra: dict[str, Any], draft: bool = False) -> Any:
    """A load with what follows post_load_weights left out: fp8 linears ask for AMX there on a CPU."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    kept = DefaultModelLoader.__dict__["postprocess_weights"]
    DefaultModelLoader.postprocess_weights = staticmethod(lambda model, device: None)
    try:
        return _load(state, path, load_format, extra, draft)
    finally:
        DefaultModelLoader.postprocess_weights = kept


def load_forbidding_requantization(
    state: Any, path: Path, extra: dict[str, Any] | None, draft: bool
) -> dict[int, Absorbed]:
    """A load (without the flag if `extra` is None) in which upstream must not requantize block-scaled weights."""
    import sglang.srt.models.deepseek_common.deepseek_weight_loader as upstream

    def forbidden(*args: Any) -> Any:
        raise AssertionError("upstream requantized a weight")

    kept, upstream.block_quant_to_tensor_quant = upstream.block_quant_to_tensor_quant, forbidden
    try:
        return load_without_amx(state, path, "auto" if extra is None else "weightprep", extra or {}, draft)
    finally:
        upstream.block_quant_to_tensor_quant = kept


def load_as_on_gfx950(state: Any, path: Path) -> dict[int, Absorbed]:
    """A load with the flag where upstream casts decoder layers too, and must not get to see their weights."""
    import sglang.srt.models.deepseek_common.deepseek_weight_loader as upstream

    cast = upstream.input_to_float8

    def watched(weight: torch.Tensor, **kwargs: Any) -> Any:
        assert weight.is_meta
        return cast(weight, **kwargs)

    upstream._use_aiter_gfx95, upstream.input_to_float8 = True, watched
    try:
        return live_sglang.absorbed(_load(state, path, "weightprep", GFX950, draft=False))
    finally:
        upstream._use_aiter_gfx95, upstream.input_to_float8 = False, cast


def origins(state: Any, key: tuple[str, str, bool]) -> dict[str, str]:
    """Where the weights of a kept model came from, by module."""
    from weightprep.engines.sglang.post_load import preparation_of

    ((_, preparation),) = preparation_of(state.models[key])
    return {module: f"{origin.route} {origin.encoding}" for module, origin in preparation.origins.items()}


def load_counting_collectives(state: Any, path: Path, extra: dict[str, Any]) -> list[tuple[str, int]]:
    """The all-reduces of a load: reduction and number of elements."""
    calls: list[tuple[str, int]] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        calls.append((str(op).rpartition(".")[2], tensor.numel()))
        return original(tensor, op=op, **kwargs)

    dist.all_reduce = counting
    try:
        _load(state, path, "weightprep", extra, draft=False)
    finally:
        dist.all_reduce = original
    return calls


@contextmanager
def _updater(model: Any, path: Path) -> Iterator[Any]:
    """sglang's own WeightUpdater on `model`, with what a model runner would hand it."""
    from types import SimpleNamespace

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    args = live_sglang.server_args(str(path))
    yield WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=ModelConfig.from_server_args(args),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *args, **kwargs: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: SimpleNamespace(model=model),
    )


def update_from_disk(
    state: Any, key: tuple[str, str, bool], path: Path, load_format: str = "weightprep"
) -> tuple[bool, str, dict[int, Absorbed]]:
    """sglang's update_weights_from_disk on a model that `load` kept."""
    model = state.models[key]
    with _updater(model, path) as updater:
        done, message = updater.update_weights_from_disk(str(path), load_format)
    return done, message, live_sglang.absorbed(model)


def _named(path: Path, layers: tuple[int, ...], parts: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    wanted = {f"model.layers.{layer}.self_attn.kv_b_proj.{part}" for layer in layers for part in parts}
    return [(name, tensor) for name, tensor in load_file(path / "model.safetensors").items() if name in wanted]


def update_from_tensors(
    state: Any,
    key: tuple[str, str, bool],
    path: Path,
    layers: tuple[int, ...],
    load_format: str | None = None,
    calls: tuple[tuple[str, ...], ...] = (("weight",),),
) -> dict[int, Absorbed]:
    """kv_b_proj of `layers` at `path` through sglang's update_weights_from_tensor, in one call per entry of `calls`."""
    model = state.models[key]
    for parts in calls:
        named: Any = _named(path, layers, parts)
        if load_format == "flattened_bucket":
            from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

            bucket = FlattenedTensorBucket(named_tensors=named)
            named = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        with _updater(model, path) as updater:
            done, message = updater.update_weights_from_tensor(named, load_format)
        assert done, message
    return live_sglang.absorbed(model)


def update_from_distributed(
    state: Any, key: tuple[str, str, bool], path: Path, layers: tuple[int, ...]
) -> dict[int, Absorbed]:
    """What update_weights_from_distributed does with tensors once they have arrived, with the session around it."""
    model = state.models[key]
    with _updater(model, path) as updater:
        updater.begin_weight_update()
        done, message = updater.load_weights_from_distributed(_named(path, layers, ("weight",)))
        assert done, message
        updater.end_weight_update(run_post_load=True)
    return live_sglang.absorbed(model)


def try_update(state: Any, key: tuple[str, str, bool], path: Path, route: str) -> tuple[bool, str, list[str]]:
    """kv_b_proj of all layers at `path` by one of sglang's routes: its answer, and what weightprep logged."""
    model = state.models[key]
    named: Any = _named(path, tuple(live_sglang.attentions(model)), ("weight",))
    with logged() as log, _updater(model, path) as updater:
        if route == "distributed":
            updater.begin_weight_update()
            done, message = updater.load_weights_from_distributed(named)
            return done, message, log
        if route == "flattened_bucket":
            from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

            bucket = FlattenedTensorBucket(named_tensors=named)
            named = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        done, message = updater.update_weights_from_tensor(named, None if route == "tensor" else route)
        return done, message, log


def absorbed_now(state: Any, key: tuple[str, str, bool]) -> dict[int, Absorbed]:
    """What a model that `load` kept has bound."""
    return live_sglang.absorbed(state.models[key])


def largest_in_kv_b(state: Any, key: tuple[str, str, bool], layer: int) -> float:
    """Of this rank's rows."""
    return float(live_sglang.attentions(state.models[key])[layer].kv_b_proj.weight.abs().max())


def stale(state: Any, key: tuple[str, str, bool]) -> list[str]:
    """The stale modules of a model that `load` kept."""
    from weightprep.engines.sglang.post_load import preparation_of

    ((holder, preparation),) = preparation_of(state.models[key])
    return preparation.stale(holder)


def copy_behind_everybodys_back(
    state: Any, key: tuple[str, str, bool], layer: int, factor: float, rank: int
) -> tuple[list[str], list[str]]:
    """The modules that are stale before and after kv_b_proj of `layer` is multiplied in place on one rank."""
    before = stale(state, key)
    if state.rank == rank:
        live_sglang.attentions(state.models[key])[layer].kv_b_proj.weight.data.mul_(factor)
    return before, stale(state, key)


def report(
    state: Any, path: Path, folder: Path, extra: dict[str, Any] | None = None, draft: bool = False
) -> dict[str, Any]:
    """The startup report of a load, as the JSON file in `folder` has it; empty on a rank that writes none."""
    import json
    import os

    folder = folder / f"rank{state.rank}"
    folder.mkdir(exist_ok=True)
    os.environ["WEIGHTPREP_REPORT"] = str(folder / "report.json")
    try:
        _load(state, path, "weightprep", GFX950 | (extra or {}), draft)
    finally:
        del os.environ["WEIGHTPREP_REPORT"]
    files = list(folder.iterdir())
    if not files:
        return {}
    (file,) = files
    document: dict[str, Any] = {**json.loads(file.read_text()), "file": file.name}
    return document


@contextmanager
def logged() -> Iterator[list[str]]:
    """What weightprep logs meanwhile, from level info on."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("weightprep"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def report_and_log(
    state: Any, path: Path, folder: Path, extra: dict[str, Any] | None = None, draft: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The startup report of a load, and what weightprep logged meanwhile."""
    with logged() as messages:
        return report(state, path, folder, extra, draft), messages


def report_of_dummies(
    state: Any, path: Path, folder: Path, precision: str, value: float
) -> tuple[dict[str, Any], list[str]]:
    """:func:`report_and_log` of a dummy load whose weights are all `value`, as uninitialised memory may be."""
    import sglang.srt.model_loader.loader as upstream

    def fill(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(value if parameter.is_floating_point() else 0)

    kept, upstream.initialize_dummy_weights = upstream.initialize_dummy_weights, fill
    try:
        return report_and_log(state, path, folder, {"inner": "dummy", "precision": precision})
    finally:
        upstream.initialize_dummy_weights = kept


def log_of_first_calls(state: Any, path: Path) -> list[str]:
    """What weightprep logs when a target and its NextN draft are loaded and their attentions are then called twice.

    Through the hooks that sglang's own calls come through on ROCm. Between the loads, too, as the target's warm-up.
    """
    from weightprep.engines.sglang import runtime_hooks
    from weightprep.runtime import witness

    def call(model: Any) -> None:
        for attention in live_sglang.attentions(model).values():
            heads, nope, rank = attention.w_kc.shape
            for rows in (2, 65):
                q, out = torch.zeros((rows, heads, nope)).bfloat16(), torch.zeros((rows, heads, rank)).bfloat16()
                runtime_hooks.rocm_absorb_q(lambda attn, q: q, attention, q)
                runtime_hooks.rocm_absorb_v(lambda attn, out: out, attention, out)

    witness._announced.clear()
    with logged() as log:
        target = _load(state, path, "weightprep", GFX950, draft=False)
        call(target)
        draft = _load(state, path, "weightprep", GFX950, draft=True)
        for model in (target, draft):
            call(model)
    return log


def update_of_mxfp4(
    state: Any, path: Path, other: Path
) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, list[torch.Tensor]]]:
    """Addresses of everything that is absorbed in MXFP4, before and after an update from `other`, and what it holds."""
    model = _load(state, path, "weightprep", GFX950 | {"precision": "mxfp4"}, draft=False)
    roles = ("w_kc", "w_vc", "w_scale_k", "w_scale_v")

    def tensors() -> dict[int, list[torch.Tensor]]:
        return {layer: [getattr(attn, role) for role in roles] for layer, attn in live_sglang.attentions(model).items()}

    def addresses() -> dict[int, list[int]]:
        return {layer: [tensor.data_ptr() for tensor in held] for layer, held in tensors().items()}

    before = addresses()
    if other != path:
        with _updater(model, path) as updater:
            done, message = updater.update_weights_from_disk(str(other), "weightprep")
        assert done, message
    return before, addresses(), {layer: [tensor.clone() for tensor in held] for layer, held in tensors().items()}


def load_through(state: Any, path: Path, inner: str, packages: Path) -> dict[int, Absorbed]:
    """A load with an inner format whose reader is in `packages`, unpacked."""
    import sys

    sys.path.append(str(packages))
    try:
        return load(state, path, extra=GFX950 | {"inner": inner})
    finally:
        sys.path.remove(str(packages))


def update_under_lora(state: Any, key: tuple[str, str, bool], layer: int) -> tuple[bool, list[torch.Tensor]]:
    """Wrap kv_b_proj of a layer as sglang wraps it for an adapter, double the weight and prepare again.

    Returns whether sglang's correction still finds the wrapper, and w_scale before and after.
    """
    from sglang.srt.lora.deepseek_mla_correction import is_kv_b_lora_active
    from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA

    model = state.models[key]
    attention = live_sglang.attentions(model)[layer]
    linear, before = attention.kv_b_proj, attention.w_scale.clone()
    wrapper = ColumnParallelLinearWithLoRA.__new__(ColumnParallelLinearWithLoRA)
    torch.nn.Module.__init__(wrapper)
    wrapper.base_layer, wrapper.set_lora, wrapper.weight = linear, True, linear.weight
    attention.kv_b_proj = wrapper
    try:
        linear.weight.data.mul_(2)
        model.post_load_weights()
        active = attention.kv_b_proj is wrapper and is_kv_b_lora_active(attention)
        return bool(active), [before, attention.w_scale.clone()]
    finally:
        attention.kv_b_proj = linear


def zero_kv_b(state: Any, key: tuple[str, str, bool]) -> dict[int, Absorbed]:
    """kv_b_proj of every layer set to zero through load_weights."""
    model = state.models[key]
    names = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in live_sglang.attentions(model)]
    shape = live_sglang.attentions(model)[0].kv_b_proj.weight.shape
    model.load_weights([(name, torch.zeros(shape, dtype=torch.bfloat16)) for name in names])
    return live_sglang.absorbed(model)


def save_sharded(state: Any, key: tuple[str, str, bool], folder: Path) -> list[str]:
    """Save a kept model in sglang's sharded_state format; returns the names in its state_dict."""
    import shutil

    from sglang.srt.model_loader.loader import ShardedStateLoader

    folder.mkdir(exist_ok=True)
    if state.rank == 0:
        for file in Path(key[0]).iterdir():
            if file.suffix == ".json":
                shutil.copy(file, folder)
    model = state.models[key]
    ShardedStateLoader.save_model(model, str(folder))
    dist.barrier()
    return list(model.state_dict())


def build_load_config(state: Any, **fields: Any) -> None:
    from sglang.srt.configs.load_config import LoadConfig

    LoadConfig(load_format="weightprep", **fields)
