"""Real sglang servers and engines in processes of their own, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STUB = HERE / "cpu_engine"
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--skip-tokenizer-init", "--dtype", "bfloat16"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "2048", "--max-running-requests", "8"),
    *("--disable-overlap-schedule", "--disable-radix-cache", "--random-seed", "0"),
]


def environment(record: Path | None = None, **changes: str) -> dict[str, str]:
    """What must be set before sglang is imported."""
    base = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "WEIGHTPREP", "SGLANG"))
    }
    base |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STUB)}
    if record is not None:
        base["PLUGIN_RECORD"] = str(record)
    return base | changes


@dataclass(frozen=True)
class Generation:
    """Per prompt: greedy tokens, and the log-probabilities of all 512 tokens at every position."""

    prompts: list[dict[str, Any]]
    log: str


def generate(model: Path, out: Path, load_format: str, extra: dict[str, Any], **env: str) -> Generation:
    """Run sglang.Engine on `model`."""
    command = [sys.executable, str(STUB / "generate.py"), str(model), str(out), load_format, json.dumps(extra)]
    done = subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=240, check=False)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    return Generation(json.loads(out.read_text()), log)


@dataclass(frozen=True)
class Server:
    """A server that answers on `port`; its output goes to `log`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def post(self, route: str, payload: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}", json.dumps(payload).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read())

    def get(self, route: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{route}", timeout=120) as response:
            return str(response.read().decode())


@contextmanager
def server(entry: list[str], model: Path, folder: Path, *flags: str, **env: str) -> Iterator[Server]:
    """Start `entry` (a command up to its flags) and stop it, and what it started, afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    command = [*entry, "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(folder / "record", **env),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, port, log)
            yield Server(process, port, log)
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"not ready in 240 s\n{log.read_text()[-6000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    # the session that this server leads holds its own processes and nothing else
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
