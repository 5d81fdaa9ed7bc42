"""Without the flag the plugin has no effect: the same load in processes with and without it, compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import servers

PASS_THROUGH = {
    "sglang.srt.configs.load_config.LoadConfig._verify_load_format",
    "sglang.srt.server_args.ServerArgs.resolve_once",
}


@pytest.fixture(scope="module")
def loads(glm: Path) -> dict[str, dict[str, Any]]:
    """What plain_load.py printed, with weightprep among sglang's plugins and without it."""

    def run(plugins: str) -> dict[str, Any]:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("plain_load.py")), str(glm)]
        env = servers.environment(SGLANG_PLUGINS=plugins, SGLANG_NCCL_SO_PATH="/nowhere")
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return {plugins: run(plugins) for plugins in ("weightprep", "none")}


def test_the_same_bytes_are_loaded(loads: dict[str, dict[str, Any]]) -> None:
    # the draft takes these two from the main model later: until then they are memory that nobody has written
    unwritten = {"True lm_head.weight", "True model.embed_tokens.weight"}
    with_plugin, without = (
        {name: digest for name, digest in loads[plugins]["contents"].items() if name not in unwritten}
        for plugins in ("weightprep", "none")
    )
    assert len(without) > 50
    assert sum("w_kc" in name for name in without) == 4
    assert with_plugin == without


def test_what_is_patched_is_two_functions_that_pass_through(loads: dict[str, dict[str, Any]]) -> None:
    assert loads["none"]["patched"] == []
    assert loads["none"]["replaced"] == []
    assert set(loads["weightprep"]["patched"]) == PASS_THROUGH
    # in the classes themselves: no other name of sglang is another function than without the plugin
    assert set(loads["weightprep"]["replaced"]) == PASS_THROUGH
    assert loads["weightprep"]["choices"] == [*loads["none"]["choices"], "weightprep"]
    assert not loads["weightprep"]["ours"], "the loader was imported without the flag"
