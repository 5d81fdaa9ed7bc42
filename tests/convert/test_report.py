"""The report is one page that needs nothing else, and says what the manifest says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightprep.checkpoint.manifest import read_manifest
from weightprep.checkpoint.repository import Checkpoint
from weightprep.cli import app
from weightprep.convert.report import _before, _by_dtype, _by_layer, _tensors
from weightprep.synth import synthesize


class Page(HTMLParser):
    """Counts what the page would fetch or run, and collects its plots and text."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.plots: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img", "link", "iframe", "object"):
            self.foreign.append(tag)
        self.foreign += [
            value for key in ("src", "href", "xlink:href") if (value := named.get(key)) and value[0] != "#"
        ]
        if tag == "svg":
            self.plots.append(named.get("aria-label") or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", encoding="mxfp4_experts")
    converted = CliRunner().invoke(app, ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--json"])
    (tmp_path / "run.json").write_text(converted.stdout)
    arguments = ["report", str(tmp_path / "dst"), "-o", str(tmp_path / "r.html"), "--run", str(tmp_path / "run.json")]

    assert CliRunner().invoke(app, arguments).exit_code == 0

    content = (tmp_path / "r.html").read_text()
    page = Page()
    page.feed(content)
    assert page.foreign == []
    assert page.plots == [
        "Relative error",
        "SQNR, dB",
        "SQNR of the worst head, dB",
        "Largest magnitude (amax)",
        "Scale",
        "Largest over smallest head amax",
        "Bytes by dtype before and after",
        "Dtypes by layer before and after",
    ]
    text = " ".join(page.text)
    manifest = json.loads((tmp_path / "dst" / "weightprep.json").read_text())
    for record in manifest["modules"]:
        assert record["module"] in text
        assert f"{record['quality']['sqnr_db']:.4g}" in text
        assert record["overrides_exclude"] in text
    assert re.search(r"\d+\.\d s, \d+ MB/s", text)


def test_same_conversion_same_page(tmp_path: Path) -> None:
    synthesize(tmp_path / "src")
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "src"), str(tmp_path / "dst")]).exit_code == 0
    for name in ("a.html", "b.html"):
        assert CliRunner().invoke(app, ["report", str(tmp_path / "dst"), "-o", str(tmp_path / name)]).exit_code == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("layout", ["inline", "sidecar"])
def test_what_the_model_is_made_of(tmp_path: Path, layout: str) -> None:
    """The bar of bytes and the map tell the same before, and what each layout makes of it after."""
    synthesize(tmp_path / "src", layers=2)
    arguments = ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--layout", layout]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    manifest = read_manifest(tmp_path / "dst" / "weightprep.json")
    source = {name: ref.info for name, ref in Checkpoint.open(tmp_path / "src").tensors.items()}

    before = _before(manifest, Checkpoint.open(tmp_path / "dst"))
    after = _tensors(tmp_path / "dst")

    assert _by_dtype(before) == _by_dtype(source)
    kinds = _by_layer(after)
    made = kinds["self_attn.kv_b_proj" if layout == "inline" else "self_attn.kv_b_proj (weightprep)"]
    assert made == {0: "F8_E4M3", 1: "F8_E4M3", 2: "F8_E4M3"}
    assert _by_layer(before)["self_attn.kv_b_proj"] == {0: "BF16", 1: "BF16", 2: "BF16"}


def test_without_matplotlib(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", layers=1, shards=1)
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "src"), str(tmp_path / "dst")]).exit_code == 0
    script = "import sys; sys.modules['matplotlib'] = None; from weightprep.cli import app; app()"
    arguments = ["report", str(tmp_path / "dst"), "-o", str(tmp_path / "r.html")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'weightprep[report]'" in done.stderr
    assert not (tmp_path / "r.html").exists()


def test_no_manifest(tmp_path: Path) -> None:
    synthesize(tmp_path / "src")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "src"), "-o", str(tmp_path / "r.html")]).exit_code == 2
    assert not (tmp_path / "r.html").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, its conversion dst, and what that printed in run.json."""
    root = tmp_path_factory.mktemp("made")
    synthesize(root / "src", layers=1, shards=1)
    converted = CliRunner().invoke(app, ["convert", str(root / "src"), str(root / "dst"), "--json"])
    (root / "run.json").write_text(converted.stdout)
    return root


def refused(*arguments: object) -> str:
    """The message of a report that cannot be made."""
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_encoding", "</script><script>alert(1)</script>"),
        ("source_encoding", "<b>"),
        ("target_sha256", {}),
        ("target_sha256", {"no.such.tensor": "0"}),
        ("layer", 10**400),
        ("layer", -1),
    ],
)
def test_an_edited_manifest_is_refused(made: Path, tmp_path: Path, key: str, value: object) -> None:
    edited = tmp_path / "dst"
    shutil.copytree(made / "dst", edited)
    document = json.loads((edited / "weightprep.json").read_text())
    document["modules"][0][key] = value
    (edited / "weightprep.json").write_text(json.dumps(document))
    refused(edited, "-o", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_module_twice_is_refused(made: Path, tmp_path: Path) -> None:
    edited = tmp_path / "dst"
    shutil.copytree(made / "dst", edited)
    document = json.loads((edited / "weightprep.json").read_text())
    document["modules"] *= 2
    (edited / "weightprep.json").write_text(json.dumps(document))
    assert "twice" in refused(edited, "-o", tmp_path / "r.html")


def test_a_name_that_is_not_utf_8(made: Path, tmp_path: Path) -> None:
    named = tmp_path / "d\udcff"
    shutil.copytree(made / "dst", named)
    assert CliRunner().invoke(app, ["report", str(named), "-o", str(tmp_path / "r.html")]).exit_code == 0
    assert "d\ufffd" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("output", ["nosuch/page.html", "folder", "file/page.html"])
def test_a_page_that_cannot_be_written_leaves_nothing(made: Path, tmp_path: Path, output: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    there = sorted(tmp_path.rglob("*"))
    assert f"{tmp_path / output}: found" in refused(made / "dst", "-o", tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == there


def test_what_is_no_result_is_told_what_was_looked_for(made: Path, tmp_path: Path) -> None:
    message = refused(made / "src", "-o", tmp_path / "r.html")
    assert "found neither weightprep.json nor weightprep/manifest.json" in message
    assert "pass the directory that convert wrote" in message
    assert "found no directory" in refused(tmp_path / "nosuch", "-o", tmp_path / "r.html")


def test_timings_of_something_else_are_refused(made: Path, tmp_path: Path) -> None:
    document = json.loads((made / "run.json").read_text())
    another = json.loads((made / "run.json").read_text())
    another["results"][0]["target_sha256"] = {"model.layers.0.self_attn.kv_b_proj.weight": "0" * 64}
    wrong = {
        "schema": {**document, "schema": "weightprep.verify/1"},
        "state": {**document, "state": "planned"},
        "placed": {**document, "placed": {"hard": "<b>"}},
        "another conversion": another,
    }
    for name, content in wrong.items():
        (tmp_path / "run.json").write_text(json.dumps(content))
        assert name in refused(made / "dst", "-o", tmp_path / "r.html", "--run", tmp_path / "run.json")
    assert not (tmp_path / "r.html").exists()


def test_timings_of_the_same_conversion_to_another_place_are_refused(made: Path, tmp_path: Path) -> None:
    again = CliRunner().invoke(app, ["convert", str(made / "src"), str(tmp_path / "again"), "--json"])
    (tmp_path / "run.json").write_text(again.stdout)
    arguments = ["-o", tmp_path / "r.html", "--run", tmp_path / "run.json"]
    assert f"the run that made {tmp_path / 'again'}, not {made / 'dst'}" in refused(made / "dst", *arguments)
    assert not (tmp_path / "r.html").exists()


def test_timings_are_found_from_another_folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    relative = CliRunner().invoke(app, ["convert", "src", "relative", "--json"])
    (tmp_path / "run.json").write_text(relative.stdout)
    monkeypatch.chdir(tmp_path)
    arguments = ["report", str(made / "relative"), "-o", "r.html", "--run", "run.json"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_help_names_the_extra() -> None:
    done = CliRunner().invoke(app, ["report", "--help"], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert "Needs `weightprep[report]`." in done.stdout
