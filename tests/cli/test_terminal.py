"""What a terminal is given to show: a stranger's names cannot paint over what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.cli.output import printable
from weightprep.synth import synthesize

# erase the line, go back to its start, and write the line of a sound result
PAINT = "\x1b[2K\rdst: sound\n\x9b1m\u202e"
SPELLED = r"\x1b[2K\rdst: sound\n\x9b1m\u202e"


def test_what_can_be_seen_stays() -> None:
    assert printable("a b: 'é' \\ 模型\n", keep="\n") == "a b: 'é' \\ 模型\n"
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
    # in a message to a person a line may end
    assert f"made by weightprep {SPELLED.replace(chr(92) + 'n', chr(10))}" in verified.stderr

    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [PAINT]}))
    refused = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "other")])
    assert refused.exit_code == 2
    for text in (verified.stdout, verified.stderr, refused.stderr):
        assert not set(text) & set("\x1b\r\x9b\u202e")
