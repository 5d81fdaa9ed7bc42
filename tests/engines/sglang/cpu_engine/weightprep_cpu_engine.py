"""sglang plugin of the tests: lets the CPU engine run MLA, switches upstream's own gfx95 cast on as the reference, and
keeps a record of what every process of a server had patched.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def register() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    # without a handler torch_native falls back to Triton's, whose MHA prefill it cannot run
    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)
    if os.environ.get("UPSTREAM_GFX95_CAST") == "1":
        from sglang.srt.models.deepseek_common import deepseek_weight_loader

        deepseek_weight_loader._use_aiter_gfx95 = True
    if "PLUGIN_RECORD" in os.environ:
        _record(os.environ["PLUGIN_RECORD"])


def _record(path: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES

    apply_hooks = HookRegistry.apply_hooks

    def recording() -> None:
        apply_hooks()
        with Path(path).open("a") as file:
            entry = {"pid": os.getpid(), "parent": os.getppid(), "patched": sorted(HookRegistry._patched)}
            file.write(json.dumps(entry | {"choices": LOAD_FORMAT_CHOICES, "argv": sys.argv}) + "\n")

    HookRegistry.apply_hooks = recording
