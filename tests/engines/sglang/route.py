"""From argv to the loader that sglang chooses, in a process of its own with one release of sglang first on the path.

    python route.py MODEL

Prints JSON: the version of the sglang that was imported, and the classes that were chosen with the flag and without it.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any

from releases import prepare_import


def main() -> None:
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
    print(
        json.dumps(
            {
                "version": metadata.version("sglang"),
                "from": _place(),
                "asked": args.load_format,
                "draft": draft.speculative_draft_load_format,
                "chosen": _loader(args.load_format, args.model_loader_extra_config),
                "plain": _loader("auto", "{}"),
                "unknown key": _loader(args.load_format, '{"target": "gfx950", "nonsense": 1}'),
                "modelopt": _loader(args.load_format, args.model_loader_extra_config, "modelopt_fp8"),
                "remote": _refusal([*flags, "--load-format", "weightprep", "--model-path", "s3://bucket/model"]),
                "ray": _refusal([*flags, "--load-format", "weightprep", "--use-ray"]),
            }
        )
    )


def _loader(load_format: str, extra: str, quantization: str | None = None) -> str:
    from types import SimpleNamespace

    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    config: Any = SimpleNamespace(quantization=quantization, _is_already_quantized=lambda: True)
    load_config = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    try:
        return type(get_model_loader(load_config, config if quantization else None)).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"


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
