"""The loader behind `--load-format weightprep`: reads weights as another load format does, and has them prepared.

sglang builds it from the load config, at startup with our keys in it and at every update from disk without them. So
what was asked for stays with the model, not with the loader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader, get_model_loader

from weightprep.checkpoint.config import ModelConfig, find_quantization
from weightprep.engines.sglang.compressor_check import start_compressors
from weightprep.engines.sglang.guard import ensure_hook
from weightprep.engines.sglang.hardware import aiter_is_on, resolve_target
from weightprep.engines.sglang.lora import server_arguments, warn_if_lora_is_ignored
from weightprep.engines.sglang.options import (
    Options,
    explaining_draft,
    explaining_flags,
    explaining_inner_keys,
    split_options,
)
from weightprep.engines.sglang.post_load import around_post_load_weights, preparation_of, preparing
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.report import check_destination
from weightprep.engines.sglang.runtime_check import RuntimeReport, refuse_runtime, start_runtime
from weightprep.engines.sglang.scale_check import check_scales
from weightprep.engines.sglang.startup_check import check_startup
from weightprep.engines.sglang.taken_paths import be_silent, mark_layers, say_paths
from weightprep.engines.sglang.updates import follow_updates
from weightprep.engines.sglang.versions import POST_LOAD_WEIGHTS, gates_version
from weightprep.errors import EngineError
from weightprep.recipe import find_recipe, load_recipe, refuse_unsound, resolve

__all__ = ["WeightprepLoader"]

logger = logging.getLogger(__name__)

# Load formats that DefaultModelLoader reads itself, and those that have a loader of their own.
_OWN = frozenset({"auto", "safetensors", "fastsafetensors", "instanttensor", "mistral"})
_DELEGATED = frozenset({"dummy", "sharded_state", "runai_streamer"})
# read files straight into GPU memory, through the GPU's runtime library
_NEEDS_GPU = frozenset({"fastsafetensors", "instanttensor"})


class WeightprepLoader(DefaultModelLoader):  # type: ignore[misc]  # sglang has no types
    """A DefaultModelLoader, because updates from disk accept no other; `inner` says how files are read."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.options, rest = split_options(load_config.model_loader_extra_config or {})
        load_config.model_loader_extra_config = rest
        load_config.load_format = _inner_format(self.options.inner)
        self._source: tuple[str, str | None] | None = None
        if self.options.inner in _OWN:
            with explaining_inner_keys(rest, self.options.inner):
                super().__init__(load_config)
        else:
            BaseModelLoader.__init__(self, load_config)
        ensure_hook(POST_LOAD_WEIGHTS, around_post_load_weights)
        follow_updates()

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Load and prepare a model.

        :raises WeightprepError: nothing is known to prepare in this model, a contract is broken and on_violation is
            error; and before anything is read, WEIGHTPREP_REPORT cannot be written, or the process has another runtime
        """
        check_destination()
        be_silent()
        with explaining_draft(bool(getattr(model_config, "is_draft_model", False))), explaining_flags():
            preparation = _plan(self.options, model_config)
        if preparation.plan.modules:
            refuse_runtime(self.options.runtime)
        with ExitStack() as stack:
            stack.enter_context(preparing(preparation))
            if self.options.inner == "dummy":
                stack.enter_context(preparation.making_up())
            else:
                stack.enter_context(self._reading(preparation, model_config.model_path, model_config.revision))
            model: torch.nn.Module
            if self.options.inner in _OWN:
                model = super().load_model(model_config=model_config, device_config=device_config)
            else:
                with explaining_inner_keys(self.load_config.model_loader_extra_config, self.options.inner):
                    inner = get_model_loader(self.load_config, model_config)
                model = inner.load_model(model_config=model_config, device_config=device_config)
        check_scales(self.options.runtime)
        if preparation.plan.modules:
            runtime = start_runtime(self.options.runtime)
            warn_if_lora_is_ignored(server_arguments())
            _check(model, weights_are_random=self.options.inner == "dummy", runtime=runtime)
        else:
            options = self.options
            target, policy = preparation.target, options.on_violation
            start_compressors(model, preparation.plan, runtime=options.runtime, on_violation=policy, target=target)
        say_paths()
        return model

    def load_weights_and_postprocess(self, model: Any, weights: Iterable[Any], target_device: torch.device) -> None:
        """Load weights into a model; upstream calls this on the instance, at startup and for updates from disk."""
        with ExitStack() as stack:
            for _, preparation in preparation_of(model):
                if self._source is not None:
                    stack.enter_context(self._reading(preparation, *self._source))
            DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)

    def _get_weights_iterator(self, source: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self._source = self._source or (source.model_or_path, source.revision)
        return super()._get_weights_iterator(source, **kwargs)  # type: ignore[no-any-return]

    def _reading(self, preparation: Preparation, model: str, revision: str | None) -> AbstractContextManager[None]:
        return preparation.reading(str(model), revision, self.load_config.download_dir)


def _inner_format(inner: str) -> LoadFormat:
    if inner not in _OWN | _DELEGATED:
        raise EngineError(
            f"inner load format {inner!r}",
            found="a format that weightprep does not wrap",
            wanted=f"one of {', '.join(sorted(_OWN | _DELEGATED))}",
            remedy="use one of these, or serve a checkpoint from `weightprep convert` without the flag",
        )
    if inner in _NEEDS_GPU and not torch.cuda.is_available():
        raise EngineError(
            f"inner load format {inner!r}",
            found="a machine without a GPU",
            wanted="a GPU, into whose memory this format reads",
            remedy='use {"inner": "auto"} or {"inner": "runai_streamer"} here',
        )
    try:
        return LoadFormat(inner)
    except ValueError:
        raise EngineError(
            f"inner load format {inner!r}",
            found="a format that this sglang does not have",
            wanted=f"one of {', '.join(item.value for item in LoadFormat)}",
            remedy="upgrade sglang or choose another format",
        ) from None


def _plan(options: Options, model_config: Any) -> Preparation:
    config = model_config.hf_config.to_dict()
    architecture = (config.get("architectures") or ["(none)"])[0]
    recipe = load_recipe(options.recipe) if options.recipe else find_recipe(architecture, config.get("model_type"))
    plan = resolve(recipe, config, precision=options.precision, nextn=options.nextn)
    _, quantization = find_quantization(config)
    stated = quantization if isinstance(quantization, Mapping) else None
    block = ModelConfig(config, (architecture,), stated, None).weight_block_size
    target = resolve_target(options.target)
    refuse_unsound(plan, target, str(gates_version()), aiter=aiter_is_on())
    return Preparation(plan, options, target, block)


def _check(model: Any, *, weights_are_random: bool, runtime: RuntimeReport) -> None:
    found = preparation_of(model)
    if not found:
        raise EngineError(
            type(model).__name__,
            found="a model that does not load its weights through DeepseekV2WeightLoaderMixin",
            wanted="a model with MLA that sglang builds on it",
            remedy="serve this model without --load-format weightprep",
        )
    for holder, preparation in found:
        check_startup(holder, preparation, weights_are_random=weights_are_random, runtime=runtime)
        mark_layers(holder, preparation.plan)
