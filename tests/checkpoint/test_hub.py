"""Hub repositories, against a local server that redirects, refuses and cuts connections; the hub's real client in
between.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer
from raw_files import write_checkpoint

from weightprep.checkpoint.hub_source import HubSource, parse_hub_source
from weightprep.checkpoint.repository import Checkpoint
from weightprep.synth import synthesize

# The client reads HF_ENDPOINT when it is imported, so looking at the hub takes a process of its own.
CLIENT = """
import json, sys
from weightprep.checkpoint import hub, hub_source
from weightprep.errors import CheckpointError

def look(action, source):
    if action == "locate":
        return {"path": str(hub_source.locate(source))}
    if action == "cached":
        return {"path": str(hub_source.locate_cached(source))}
    checkpoint = hub.open_headers(source)
    return {
        "tensors": {name: [ref.shard, ref.info.dtype, ref.info.shape] for name, ref in checkpoint.tensors.items()},
        "architectures": checkpoint.config.architectures,
        "quantization": checkpoint.config.quantization,
        "root": str(checkpoint.root),
        "others": [str(path) for path in checkpoint.other_files],
    }

for line in sys.stdin:
    action, source = json.loads(line)
    try:
        answer = look(action, source)
    except CheckpointError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that looks at hub repositories, with a cache of its own."""

    def __init__(self, home: Path, endpoint: str, **environment: str) -> None:
        self.home = home
        cache = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **cache, **environment},
        )

    def ask(self, action: str, source: str) -> dict[str, object]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([action, source]), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """One server and one client for all tests: importing the client takes seconds."""
    with HubServer(tmp_path_factory.mktemp("unused")) as server:
        server.start()
        client = Client(tmp_path_factory.mktemp("cache") / "home", server.url)
        yield server, client
        client.close()
        server.shutdown()


@pytest.fixture
def server(hub, tmp_path):
    """The server with an empty repository, and nothing in the client's cache."""
    server, client = hub
    shutil.rmtree(client.home, ignore_errors=True)
    server.reset(tmp_path / "repository")
    return server


@pytest.fixture
def ask(hub, server):
    return hub[1].ask


def listed(checkpoint: Checkpoint) -> dict[str, list[object]]:
    return {n: [ref.shard, ref.info.dtype, list(ref.info.shape)] for n, ref in checkpoint.tensors.items()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("zai-org/GLM-5.2", HubSource("zai-org/GLM-5.2")),
        ("zai-org/GLM-5.2@main", HubSource("zai-org/GLM-5.2")),
        ("zai-org/GLM-5.2@refs/pr/3", HubSource("zai-org/GLM-5.2", "refs/pr/3")),
        ("hf://zai-org/GLM-5.2@abc123", HubSource("zai-org/GLM-5.2", "abc123")),
        ("hf:/zai-org/GLM-5.2", HubSource("zai-org/GLM-5.2")),
        ("GLM-5.2", None),
        ("/models/GLM-5.2", None),
        ("./models/GLM-5.2", None),
        ("a/b/c", None),
        ("tests/checkpoint", None),
    ],
)
def test_which_sources_are_hub_ids(source, expected, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert parse_hub_source(source) == expected


def test_a_scheme_survives_becoming_a_path():
    assert parse_hub_source(Path("hf://zai-org/GLM-5.2@abc123")) == HubSource("zai-org/GLM-5.2", "abc123")


def test_headers_alone(server, ask):
    """Of 4 MB of weights a look fetches the headers; tensors and config are those of the files."""
    synthesize(server.root, layers=1, encoding="fp8_block", shards=2)
    expected = Checkpoint.open(server.root)
    got = ask("open", "org/name")
    assert got["tensors"] == listed(expected)
    assert got["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert got["quantization"] == expected.config.quantization
    assert got["root"] == f"org/name@{COMMIT}"
    assert got["others"] == ["README.md", "config.json", "generation_config.json"]
    weights = [(method, asked) for method, path, asked in server.requests if path.startswith("/cdn/")]
    assert weights == [("GET", "bytes=0-131071")] * 2
    assert server.sent < 2 * 131072 + 100_000


def test_a_header_longer_than_the_first_request(server, ask):
    write_checkpoint(server.root, {"model.safetensors": [f"{'long' * 40}.{i}" for i in range(1500)]})
    got = ask("open", "org/name@main")
    assert got["tensors"] == listed(Checkpoint.open(server.root))
    asked = [asked for _, path, asked in server.requests if path.startswith("/cdn/")]
    assert len(asked) == 2
    assert asked[1].startswith("bytes=131072-")


def test_a_cut_connection_goes_on_where_it_stopped(server, ask):
    synthesize(server.root, layers=1, shards=1)
    server.cuts = 2
    got = ask("open", "org/name")
    assert got["tensors"] == listed(Checkpoint.open(server.root))
    asked = [asked for _, path, asked in server.requests if path.startswith("/cdn/")]
    assert asked == ["bytes=0-131071", "bytes=65536-131071", "bytes=98304-131071"]


def test_a_connection_that_is_always_cut_is_an_error(server, ask):
    synthesize(server.root, layers=1, shards=1)
    server.cuts = 1000
    assert "was cut 5 times" in str(ask("open", "org/name")["error"])


def test_a_server_that_ignores_ranges_is_refused_unread(server, ask):
    synthesize(server.root, layers=1, shards=1)
    server.ignore_range = True
    assert "not the range that was asked for" in str(ask("open", "org/name")["error"])


REFUSALS = {
    "org/absent": "no such repository",
    "org/private": "hf auth login",
    "org/gated": "request access",
    "org/name@absent": "no revision 'absent'",
}


def test_bytes_from_another_place_are_refused(server, ask):
    synthesize(server.root, layers=1, shards=1)
    server.shift_range = 8
    assert "not the range that was asked for" in str(ask("open", "org/name")["error"])


@pytest.mark.parametrize("action", ["open", "locate"])
def test_refusals_say_what_to_do(server, ask, action):
    write_checkpoint(server.root, {"model.safetensors": ["a"]})
    for source, message in REFUSALS.items():
        error = str(ask(action, source)["error"])
        assert message in error
        assert source in error


def test_a_repository_without_a_config(server, ask):
    write_checkpoint(server.root, {"model.safetensors": ["a"]})
    (server.root / "config.json").unlink()
    assert "missing file" in str(ask("open", "org/name")["error"])


def test_remote_files_pass_the_same_checks(server, ask):
    write_checkpoint(server.root, {"1.safetensors": ["a"], "2.safetensors": ["b"]}, index={"a": "1.safetensors"})
    assert "does not name" in str(ask("open", "org/name")["error"])


def test_nobody_listens(tmp_path):
    client = Client(tmp_path, "http://127.0.0.1:9")
    assert "org/name@main" in str(client.ask("open", "org/name")["error"])
    client.close()


def test_snapshot_is_cached_without_pickles_and_opens_offline(hub, server, ask):
    # The client writes 10 MB at a time, so the half that arrives must be longer to be worth resuming.
    synthesize(server.root, layers=2, shards=2, size=60_000_000)
    (server.root / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    server.cuts = 1
    path = Path(str(ask("locate", "org/name")["path"]))
    assert path.name == COMMIT
    checkpoint = Checkpoint.open(path)
    assert listed(checkpoint) == listed(Checkpoint.open(server.root))
    assert Path("pytorch_model.bin") not in checkpoint.other_files
    for name in checkpoint.shards:
        assert (path / name).read_bytes() == (server.root / name).read_bytes()
    assert any(asked and not asked.startswith("bytes=0-") for _, _, asked in server.requests)
    offline = Client(hub[1].home, server.url, HF_HUB_OFFLINE="1")
    assert offline.ask("locate", "org/name") == {"path": str(path)}
    assert "no complete copy" in str(offline.ask("locate", "org/other")["error"])
    # the listing of the repository, which the cache keeps, has the pickle that is not there
    assert offline.ask("cached", "org/name") == {"path": str(path)}
    assert offline.ask("cached", "org/other") == {"path": "None"}
    offline.close()


def test_local_directories_are_used_as_they_are(server, ask, tmp_path):
    local = write_checkpoint(tmp_path / "org" / "name", {"model.safetensors": ["a"]})
    assert ask("locate", str(local)) == {"path": str(local)}
    assert ask("open", str(local))["root"] == str(local)
    assert server.requests == []


def test_what_headers_refuse_is_refused_before_the_download(hub, server, tmp_path):
    synthesize(server.root, layers=2, shards=2, encoding="fp8_block")
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(hub[1].home)}
    command = [sys.executable, "-m", "weightprep", "convert", "org/name", str(tmp_path / "dst")]
    for flags, code, said in (
        ([], 0, "nothing to convert"),
        (["--requantize", "--precision", "mxfp4"], 2, "--layout sidecar"),
    ):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
    assert not list(hub[1].home.rglob("*.safetensors"))
    assert list(tmp_path.glob("dst*")) == []


def test_the_commands_take_hub_ids(hub, server, tmp_path):
    synthesize(server.root, layers=2, shards=2)
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(hub[1].home)}

    def run(*arguments: str) -> dict[str, object]:
        command = [str(Path(sys.executable).with_name("weightprep")), *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        return document

    looked = run("inspect", "hf://org/name@main")
    assert (looked["tensors"], looked["shards"]) == (len(Checkpoint.open(server.root).tensors), 2)
    planned = run("convert", "org/name@main", str(tmp_path / "converted"), "--dry-run")
    local = run("convert", str(server.root), str(tmp_path / "converted"), "--dry-run")
    same = planned.keys() - {"source", "needed_bytes", "free_bytes", "estimate"}
    assert {key: planned[key] for key in same} == {key: local[key] for key in same}
    assert planned["estimate"] is None
    weights = [asked for _, path, asked in server.requests if path.startswith("/cdn/")]
    assert weights == ["bytes=0-131071"] * 4
    assert not list(hub[1].home.rglob("*.safetensors"))
    run("convert", "org/name", str(tmp_path / "converted"))
    assert run("verify", "org/name", str(tmp_path / "converted"))["ok"] is True
