"""The command line as people and scripts meet it: real processes, their streams, exit codes and documents."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightprep.cli.progress import progress
from weightprep.synth import synthesize

PROGRAM = Path(sys.executable).with_name("weightprep")
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("source") / "src", layers=2, shards=2)


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("converted") / "dst"
    assert run("convert", source, destination).returncode == 0
    return destination


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program without a terminal; words wide enough that no help text is wrapped inside a name."""
    return subprocess.run(
        [sys.executable, "-m", "weightprep", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "160", "NO_COLOR": "1", **environment},
    )


@pytest.mark.parametrize("command", ["convert", "inspect", "verify", "report", "synth", "doctor", "recipes list"])
def test_help_has_an_example(command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    # an example is a line that one can paste
    assert re.search(rf"^[ │]*weightprep {command}\b", done.stdout, re.MULTILINE), done.stdout
    assert "--json" in done.stdout


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
def test_help_keeps_what_is_in_brackets(command: str) -> None:
    assert "org/name[@revision]" in run(command, "--help").stdout


def section(name: str) -> str:
    text = DOCS.read_text(encoding="utf-8")
    return text[text.index(f"\n## {name}\n") :].split("\n## ", 2)[1]


def keys(document: object) -> set[str]:
    """Every key at every depth, apart from those that are names of files or tensors."""
    if isinstance(document, list):
        return set().union(*map(keys, document))
    if not isinstance(document, dict):
        return set()
    names = {"dtypes", "recipe_content", "source_sha256", "target_sha256", "tensors", "placed"}
    found = set(document) - {"schema"}
    return found.union(*(keys(value) for key, value in document.items() if key not in names))


COMMANDS = {
    "convert": ["convert", "SRC", "NEW"],
    "dry run": ["convert", "SRC", "NEW", "--dry-run"],
    "inspect": ["inspect", "SRC"],
    "verify": ["verify", "SRC", "DST"],
    "report": ["report", "DST", "-o", "PAGE"],
    "recipes": ["recipes", "list"],
    "check": ["recipes", "check", "glm_moe_dsa"],
    "synth": ["synth", "NEW", "--layers", "1"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_document_is_alone_on_stdout_and_documented(
    source: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    places = {"SRC": source, "DST": converted, "NEW": tmp_path / "new", "PAGE": tmp_path / "page.html"}
    command = COMMANDS[name]
    done = run(*(places.get(word, word) for word in command), "--json")
    # doctor finds no GPU here and says so
    assert done.returncode in ((0, 1) if name == "doctor" else (0,)), done.stderr
    document = json.loads(done.stdout)
    page = section(command[0])
    assert re.fullmatch(r"weightprep\.[a-z-]+/1", document["schema"])
    assert f"`{document['schema']}`" in page
    # records of modules are described where weightprep.json is
    more = (DOCS.parent / "convert.md").read_text(encoding="utf-8") if name == "convert" else ""
    undocumented = {key for key in keys(document) if not re.search(rf"[`.\"]{key}[`\"]", page + more)}
    assert undocumented == set()


def test_every_documented_key_of_convert_is_there(source: Path, tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("convert"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    planned = json.loads(run("convert", source, tmp_path / "dst", "--dry-run", "--json").stdout)
    done = json.loads(run("convert", source, tmp_path / "dst", "--json").stdout)
    assert documented == (planned.keys() | done.keys()) - {"schema"}


def test_failures_are_documents_too(source: Path, tmp_path: Path) -> None:
    done = run("convert", tmp_path / "nothing", tmp_path / "dst", "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert document["schema"] == "weightprep.error/1"
    assert set(document["error"]) == {"type", "subject", "found", "wanted", "remedy"}
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wrong", [["--no-such-flag"], ["--workers", "many"], []])
def test_usage_errors_are_text_alone(wrong: list[str]) -> None:
    done = run("convert", "--json", *wrong)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage: " in done.stderr


@pytest.mark.parametrize("start", [["-m", "weightprep"], ["-c", "from weightprep.__main__ import main; main()"]])
@pytest.mark.parametrize("module", ["typer", "yaml"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_interruption_is_told_of_while_the_program_still_imports(
    source: Path, tmp_path: Path, start: list[str], module: str, options: list[str]
) -> None:
    """SIGINT in the import of `module`: typer is imported before the command is known, yaml by the command itself."""
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / f"{module}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *start, "convert", source, tmp_path / "dst", *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 130
    assert done.stderr == "interrupted; what is finished has been kept: run the same command again to go on\n"
    if options:
        assert json.loads(done.stdout)["error"]["type"] == "Interrupted"
    else:
        assert done.stdout == ""
    assert not (tmp_path / "dst").exists()


def test_exit_codes(source: Path, converted: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(converted, spoiled)
    (spoiled / "README.md").write_text("other")
    assert run("verify", source, converted).returncode == 0
    assert run("verify", source, spoiled).returncode == 1
    assert run("verify", source, tmp_path / "nothing").returncode == 2
    assert run("convert", source, tmp_path / "dst", "--part", "3/2").returncode == 2
    assert run("convert", source, tmp_path / "dst", "--no-such-flag").returncode == 2


def test_verify_tells_what_is_no_result_from_what_is_a_bad_one(source: Path, converted: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(converted, spoiled)
    (spoiled / "README.md").write_text("other")
    assert run("verify", source, spoiled).stderr.endswith(f"do not serve {spoiled}; convert again\n")
    swapped = run("verify", converted, source)
    assert swapped.returncode == 1
    assert swapped.stderr.endswith(f"{source} is not a result of convert\n")
    assert "serve" not in swapped.stderr


def test_dry_run_tells_space_and_time_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "dst", "--dry-run", "--link", "copy")
    assert done.returncode == 0
    assert re.search(r"needs \d+\.\d\d GB at the destination; \d+\.\d\d GB are free there\n", done.stdout)
    assert re.search(r"about \d+ s at \d+ MB/s, the rate at which a sample of \d+ MB was copied", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_estimate_follows_from_the_sample(source: Path, tmp_path: Path) -> None:
    document = json.loads(run("convert", source, tmp_path / "dst", "--dry-run", "--link", "copy", "--json").stdout)
    made = document["estimate"]
    # 16 MiB stay free
    assert made["nbytes"] == document["needed_bytes"] - 2**24
    # smaller than what is sampled at most, so all of it was
    assert made["sample_bytes"] == max(path.stat().st_size for path in source.glob("*.safetensors"))
    assert made["seconds"] == pytest.approx(made["nbytes"] / made["sample_bytes"] * made["sample_seconds"])


def test_no_estimate_where_a_sample_has_no_room(source: Path, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here; a dry run for a disk with hardly any room is not tried")
    try:
        document = json.loads(run("convert", source, tmp_path / "dst", "--dry-run", "--json").stdout)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    assert document["estimate"] is None


def test_dry_run_and_convert_agree_on_the_space(source: Path, tmp_path: Path) -> None:
    """On a file system that is a little too small for the whole, and large enough for what one of two parts leaves."""
    whole = json.loads(run("convert", source, tmp_path / "dst", "--dry-run", "--json").stdout)["needed_bytes"]
    command = ["mount", "-t", "tmpfs", "-o", f"size={whole - 4096}", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here; the space on a disk that is too small is not tried")
    try:
        planned = run("convert", source, tmp_path / "dst", "--dry-run")
        refused = run("convert", source, tmp_path / "dst", "--json")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    assert planned.returncode == 0
    assert "GB are free there, so convert would not begin\n" in planned.stdout
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["wanted"] == f"{whole:,} bytes"


def test_at_the_end_it_says_what_to_do_next(source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "dst")
    assert f"next: weightprep verify {source} {tmp_path / 'dst'}" in done.stderr
    assert "--load-format weightprep" in done.stderr
    assert "next:" not in done.stdout


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in work and all of them, with rate and time left; every ten seconds, here at every chance."""
    monkeypatch.setattr("weightprep.cli.progress._LINE_EVERY_SECONDS", 0.0)
    with progress(4_000_000_000) as shown:
        shown.begin("a.safetensors", 1_000_000_000)
        shown.begin("b.safetensors", 3_000_000_000)
        shown.advance("a.safetensors", 1_000_000_000)
        shown.end("a.safetensors")
        shown.advance("b.safetensors", 1_500_000_000)
    first, second = capsys.readouterr().err.splitlines()
    figures = r"\d+ MB/s, \d+ s left; "
    assert re.fullmatch(rf"1\.0 of 4\.0 GB, {figures}a\.safetensors 100 %, b\.safetensors 0 %", first)
    assert re.fullmatch(rf"2\.5 of 4\.0 GB, {figures}b\.safetensors 50 %", second)


def test_bars_at_a_terminal(source: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--link", "copy"]
    with subprocess.Popen(
        [sys.executable, "-m", "weightprep", *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "160"},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:
            # how a terminal says that the other side is gone
            pass
        assert process.stdout is not None
        assert b"converted" in process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert b"all files" in shown
    assert b"model-00001-of-00002.safetensors" in shown


def test_completion_can_be_installed_and_completes(tmp_path: Path) -> None:
    done = run("--install-completion", "bash", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    script = (
        f"source {tmp_path}/.bash_completions/*.sh && complete -p weightprep >/dev/null && "
        'complete_one() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; '
        '$(complete -p weightprep | sed \'s/.*-F \\([^ ]*\\).*/\\1/\') weightprep "${!#}" ""; '
        'printf "%s\\n" "${COMPREPLY[@]}"; }; '
        "complete_one weightprep con; echo --; complete_one weightprep convert --la; echo --; "
        "complete_one weightprep convert a b --executor r"
    )
    environment = os.environ | {"PATH": f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert shell.returncode == 0, shell.stderr
    assert [part.split() for part in shell.stdout.split("--\n")] == [["convert"], ["--layout"], ["ray"]]


@pytest.mark.parametrize(
    ("shell", "mark"),
    [
        ("bash", "complete -o default -F"),
        ("zsh", "#compdef weightprep"),
        ("fish", "complete --command weightprep"),
        ("pwsh", "Register-ArgumentCompleter -Native -CommandName weightprep"),
    ],
)
def test_completion_is_that_of_the_shell_that_is_named(shell: str, mark: str) -> None:
    """Shells that are not installed here are asked for too: what is printed does not depend on who asks."""
    done = run("--show-completion", shell)
    assert done.returncode == 0, done.stderr
    assert mark in done.stdout


@pytest.mark.parametrize(
    ("shell", "file"), [("zsh", ".zfunc/_weightprep"), ("fish", ".config/fish/completions/weightprep.fish")]
)
def test_completion_is_installed_for_no_other_shell(shell: str, file: str, tmp_path: Path) -> None:
    assert run("--install-completion", shell, HOME=str(tmp_path)).returncode == 0
    assert (tmp_path / file).is_file()
    assert not (tmp_path / ".bashrc").exists()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_what_the_scripts_of_other_shells_ask_is_answered(shell: str) -> None:
    asked = {"_WEIGHTPREP_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "weightprep conv"}
    done = run(**asked, _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert "convert" in done.stdout, done.stderr


def test_a_shell_without_completion_is_a_usage_error(tmp_path: Path) -> None:
    for arguments in (["--install-completion"], ["--install-completion", "tcsh"]):
        assert run(*arguments, HOME=str(tmp_path)).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough(source: Path) -> None:
    pipeline = f"{sys.executable} -m weightprep inspect {source} --json | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, text=True, check=False)
    # 141 where the pipe was closed before all was written, as for any program that is cut off
    assert done.stdout.splitlines()[0] == "{"
    assert done.stdout.splitlines()[1] in ("0", "141")
    assert "Traceback" not in done.stderr
