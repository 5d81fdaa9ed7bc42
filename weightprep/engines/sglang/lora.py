"""LoRA adapters on kv_b_proj: the absorbed matmuls never call that layer, so they need a correction of their own.

Every known sglang has one, on top of whatever w_kc and w_vc are, and it is kept. A release that lost it would serve
such an adapter without its effect and without an error.
"""

from __future__ import annotations

import logging
from typing import Any

from weightprep.engines.sglang.versions import LORA_CORRECTION, installed_root, installed_version

__all__ = ["server_arguments", "warn_if_lora_is_ignored"]

logger = logging.getLogger(__name__)


def warn_if_lora_is_ignored(server: Any) -> None:
    """Warn if this server takes adapters and its sglang does not correct absorbed matmuls for them.

    :param server: sglang's ServerArgs
    """
    if not (getattr(server, "enable_lora", False) or getattr(server, "lora_paths", None)):
        return
    root = installed_root()
    if root is not None and LORA_CORRECTION.found(root) is None:
        logger.warning(
            "weightprep: LoRA is on, and sglang %s has no correction for adapters on kv_b_proj in absorbed attention: "
            "such an adapter has NO EFFECT in decoding. Merge it into the weights, or use a release with %s",
            installed_version(),
            LORA_CORRECTION.anywhere[0],
        )


def server_arguments() -> Any:
    """The arguments of the server in this process, under the name that its release has for them; None outside one."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        # 0.5.12
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        return get_server_args()
    except (ValueError, RuntimeError, AttributeError, LookupError):
        return None
