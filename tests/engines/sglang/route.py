"""From argv to the loader that sglang chooses, in a process of its own with one release of sglang first on the path.

    python route.py MODEL

Prints JSON: the version of the sglang that was imported, and the classes that were chosen with the flag and without it.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from releases import prepare_import

from weightprep.engines.sglang import post_load, versions


def main() -> None:
    # a third of the time that importing sglang takes, and of use on CUDA only; its absence is an ImportError to sglang
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    prepare_import()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    model = sys.argv[1]
    flags = ["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native", "--skip-tokenizer-init"]
    args = prepare_server_args(
        [*flags, "--load-format", "weightprep", "--model-loader-extra-config", '{"target": "gfx950"}']
    )
    draft = prepare_server_args([*flags, "--speculative-draft-load-format", "weightprep"])
    # before a model is loaded in our format: what is asked for is remembered
    without = _loader("auto", '{"target": "gfx950"}')
    _publish(draft)
    target = _loader("auto", '{"target": "gfx950", "num_threads": 2}')
    # a release may have written the draft's format over the target's by the time that the draft is loaded
    _publish(prepare_server_args([*flags, "--speculative-draft-load-format", "auto"]))
    print(
        json.dumps(
            {
                "keys without the flag": without,
                "target beside our draft": target,
                "version": metadata.version("sglang"),
                "from": _place(),
                "asked": args.load_format,
                "draft": draft.speculative_draft_load_format,
                "chosen": _loader(args.load_format, args.model_loader_extra_config),
                "plain": _loader("auto", "{}"),
                "draft beside our target": _loader("auto", args.model_loader_extra_config),
                "unknown key": _loader(args.load_format, '{"target": "gfx950", "nonsense": 1}'),
                "modelopt": _loader(args.load_format, args.model_loader_extra_config, "modelopt_fp8"),
                "updates": {str(name): _update(name) for name in (None, "direct", "route._custom_weight_loader")},
                "remote": _refusal([*flags, "--load-format", "weightprep", "--model-path", "s3://bucket/model"]),
                "misspelt": _refusal(
                    [*flags, "--load-format", "weightprep", "--model-loader-extra-config", '{"precison": "fp8"}']
                ),
                "ray": _refusal([*flags, "--load-format", "weightprep", "--use-ray"]),
            }
        )
    )


def _publish(args: Any) -> None:
    """Make `args` those of this process, as a scheduler does."""
    try:
        from sglang.srt.runtime_context import publish
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    else:
        publish(args, role="scheduler")


def _loader(load_format: str, extra: str, quantization: str | None = None) -> str:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    config: Any = SimpleNamespace(quantization=quantization, _is_already_quantized=lambda: True)
    load_config = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    try:
        return type(get_model_loader(load_config, config if quantization else None)).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _custom_weight_loader(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A user's own, as --custom-weight-loader names it."""
    for name, tensor in named_tensors:
        model.get_parameter(name).data.copy_(tensor)


class _Model(torch.nn.Linear):
    """A prepared model as far as an update knows it; writes down what is called."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.calls: list[str] = []
        vars(self)[post_load._STATE] = None

    def load_weights(self, weights: Any) -> None:
        self.calls.append("load_weights")

    def post_load_weights(self) -> None:
        self.calls.append(f"post_load_weights with {float(self.weight)}")


def _update(load_format: str | None) -> list[str]:
    """What this release's update_weights_from_tensor, hooked when the loader was made, calls on a prepared model."""
    root = versions.installed_root()
    assert root is not None
    place, _, method = str(versions.UPDATE_FROM_TENSOR.found(root)).rpartition(".")
    module, _, owner = place.rpartition(".")
    model, custom = _Model(), ["route._custom_weight_loader"]
    updater = SimpleNamespace(
        model=model,
        get_model=lambda: model,
        device="cpu",
        tp_rank=0,
        custom_weight_loaders=custom,
        server_args=SimpleNamespace(custom_weight_loader=custom),
        _assert_weight_cache_inactive=lambda operation: None,
    )
    update = getattr(getattr(importlib.import_module(module), owner), method)
    with _as_rank_0():
        done, message = update(updater, [("weight", torch.full((1, 1), 7.0))], load_format)
    assert done, message
    return model.calls


def _as_rank_0() -> AbstractContextManager[Any]:
    """Newer releases ask the process for its rank, not the updater."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return nullcontext()
    return get_parallel().override(tp_rank=0)  # type: ignore[no-any-return]


def _refusal(flags: list[str]) -> str:
    from sglang.srt.server_args import prepare_server_args

    try:
        args = prepare_server_args(flags)
        # newer releases leave this to the launcher
        getattr(args, "resolve_once", lambda: None)()
        return f"accepted with load format {args.load_format}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _place() -> str:
    import sglang

    return str(sglang.__path__[0])


if __name__ == "__main__":
    main()
