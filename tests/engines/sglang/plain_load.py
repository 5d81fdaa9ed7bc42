"""A load without the flag in a process of its own:  python plain_load.py MODEL

Prints JSON: what sglang's plugins patched, every function and class of sglang that another package stands in for, and
the SHA-256 of all that the loaded model holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import live_sglang
import torch

import weightprep

PACKAGE = str(Path(weightprep.__file__).parent)


def main() -> None:
    model_path = sys.argv[1]
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = live_sglang.start(0, 1, port, model_path)
    contents = {}
    for draft in (False, True):
        model = live_sglang.load(args, draft=draft)
        contents |= {f"{draft} {name}": _digest(tensor) for name, tensor in model.state_dict().items()}
        for layer, attention in live_sglang.attentions(model).items():
            for name in ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v"):
                contents[f"{draft} {layer} {name}"] = _digest(getattr(attention, name))
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES

    found = {"patched": sorted(HookRegistry._patched), "replaced": _replaced(), "contents": contents}
    print(
        json.dumps(found | {"choices": LOAD_FORMAT_CHOICES, "ours": "weightprep.engines.sglang.loader" in sys.modules})
    )
    # no clean-up: the process group would wait for peers that never were
    sys.stdout.flush()
    os._exit(0)


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = value.contiguous().reshape(-1)
    form = f"{value.dtype} {tuple(value.shape)} {value.stride()} "
    return form + hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _replaced() -> list[str]:
    """Names in sglang's modules and classes that are a hook's wrapper, whatever registry put it there."""
    found = set()
    for module_name, module in list(sys.modules.items()):
        is_registry = module_name == "sglang.srt.plugins.hook_registry"
        if not module_name.startswith("sglang.") or not isinstance(module, types.ModuleType) or is_registry:
            continue
        for name, value in list(vars(module).items()):
            places = [(f"{module_name}.{name}", value)]
            if isinstance(value, type) and value.__module__ == module_name:
                places += [(f"{module_name}.{name}.{key}", member) for key, member in vars(value).items()]
            found |= {place for place, member in places if _is_foreign(member)}
    return sorted(found)


def _is_foreign(member: Any) -> bool:
    code = getattr(member, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    # the hook registry's own wrappers, and functions of the package that were put there
    return code.co_filename.endswith("hook_registry.py") or code.co_filename.startswith(PACKAGE)


if __name__ == "__main__":
    main()
