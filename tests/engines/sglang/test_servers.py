"""Real servers and engines on the CPU: every entry point takes the flag, and the text is upstream's, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import servers
from hf_cache import into_cache
from servers import Generation
from tiny_models import LAYERS

from weightprep.engines.sglang.versions import POST_LOAD_WEIGHTS, VERIFY_LOAD_FORMAT

GFX950 = {"target": "gfx950"}
FLAG = ("--load-format", "weightprep", "--model-loader-extra-config", json.dumps(GFX950))
SGLANG = str(Path(sys.executable).with_name("sglang"))


@pytest.fixture(scope="module")
def upstreams(cpu_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Generation:
    """sglang's own load-time cast for gfx950, without the flag."""
    out = tmp_path_factory.mktemp("upstream") / "out.json"
    return servers.generate(cpu_glm, out, "auto", {}, UPSTREAM_GFX95_CAST="1")


@pytest.fixture(scope="module")
def ours(cpu_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Generation:
    return servers.generate(cpu_glm, tmp_path_factory.mktemp("ours") / "out.json", "weightprep", GFX950)


def test_engine_generates_upstreams_tokens_and_log_probs(upstreams: Generation, ours: Generation) -> None:
    assert ours.prompts == upstreams.prompts
    # every position of every prompt, and the tokens generated after it
    assert sum(len(prompt["prefill"]) + len(prompt["decode"]) for prompt in ours.prompts) == 39 + 5 + 2 + 3 * 16


def test_a_wrong_scale_would_be_seen(cpu_glm: Path, upstreams: Generation, tmp_path: Path) -> None:
    plain = servers.generate(cpu_glm, tmp_path / "out.json", "auto", {})
    assert plain.prompts != upstreams.prompts


@pytest.mark.parametrize("is_hub_id", [False, True], ids=["directory", "hub"])
def test_engine_generates_the_same_from_a_sidecar(
    is_hub_id: bool, cpu_glm: Path, upstreams: Generation, tmp_path: Path
) -> None:
    converted = tmp_path / "sidecar"
    command = [
        str(Path(sys.executable).with_name("weightprep")),
        "convert",
        str(cpu_glm),
        str(converted),
        "--layout",
        "sidecar",
    ]
    subprocess.run(command, check=True, capture_output=True)
    model, environment = converted, {}
    if is_hub_id:
        into_cache(converted, tmp_path / "home" / "hub")
        model, environment = Path("org/name"), {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    generation = servers.generate(model, tmp_path / "out.json", "weightprep", GFX950, **environment)
    assert "sidecar" in generation.log
    assert generation.prompts == upstreams.prompts


@pytest.mark.parametrize(
    "entry", [[sys.executable, "-m", "sglang.launch_server"], [SGLANG, "serve"]], ids=["module", "serve"]
)
def test_flag_is_accepted_by_servers(entry: list[str], cpu_glm: Path, ours: Generation, tmp_path: Path) -> None:
    with servers.server(entry, cpu_glm, tmp_path, *FLAG) as server:
        prompt = [5, 17, 33, 91, 200, 301]
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert answer["output_ids"] == ours.prompts[1]["tokens"]
    processes = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    live = {process["pid"] for process in processes if VERIFY_LOAD_FORMAT in process["patched"]}
    # the launcher, the scheduler and the detokenizer
    assert len(live) >= 3
    prepared = {process["pid"] for process in processes if POST_LOAD_WEIGHTS in process["patched"]}
    assert len(prepared) == 1, "only the scheduler loads a model"


def test_metrics_of_a_server_hold_ours(cpu_glm: Path, tmp_path: Path) -> None:
    entry = [sys.executable, "-m", "sglang.launch_server"]
    with servers.server(entry, cpu_glm, tmp_path, *FLAG, "--enable-metrics") as server:
        deadline = time.monotonic() + 60
        # the calls of the canary; they are carried over every few seconds
        while "weightprep_path_calls_total{" not in (text := server.get("/metrics")) and time.monotonic() < deadline:
            time.sleep(1)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("weightprep_"))
    layers = {name: float(value) for name, value in samples.items() if name.startswith("weightprep_layers{")}
    assert list(layers.values()) == [LAYERS]
    assert 'path="fp8_absorbed"' in next(iter(layers))
    calls = [float(value) for name, value in samples.items() if name.startswith("weightprep_path_calls_total{")]
    assert calls
    assert min(calls) > 0


def test_left_out_of_sglang_plugins_is_refused_by_the_parser(cpu_glm: Path) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(cpu_glm), *FLAG]
    env = servers.environment(SGLANG_PLUGINS="weightprep_cpu_engine")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'weightprep'" in done.stderr
