"""What is beside, at or instead of the destination: nothing that weightprep did not make is written into or removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_hashes import hashes
from typer.testing import CliRunner, Result

from weightprep.checkpoint.paths import walk_files
from weightprep.cli import app
from weightprep.convert.execute import execute
from weightprep.convert.files import Unwatched
from weightprep.convert.options import ConvertOptions, LinkMode
from weightprep.convert.planner import make_plan
from weightprep.errors import CheckpointError
from weightprep.synth import synthesize


class AtEnd(Unwatched):
    """Does something when the first file is finished."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def end(self, file: str) -> None:
        if self._act is not None:
            act, self._act = self._act, None
            act()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = synthesize(tmp_path_factory.mktemp("source") / "src", shards=4)
    before = hashes(root)
    yield root
    # no test of this file may have changed a byte of it
    assert hashes(root) == before


def convert(*args: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, args)])


def sound(source: Path, destination: Path) -> bool:
    return CliRunner().invoke(app, ["verify", str(source), str(destination)]).exit_code == 0


def refused(result: Result, said: str) -> None:
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert isinstance(result.exception, SystemExit)


class TestReplacing:
    @pytest.mark.parametrize("flags", [[], ["--overwrite"]])
    def test_a_directory_with_the_suffix_replaced_is_somebody_elses(
        self, source: Path, tmp_path: Path, flags: list[str]
    ) -> None:
        (tmp_path / "dst.replaced").mkdir()
        (tmp_path / "dst.replaced" / "thesis.tex").write_text("mine")
        if flags:
            assert convert(source, tmp_path / "dst").exit_code == 0
        assert convert(source, tmp_path / "dst", *flags).exit_code == 0
        assert (tmp_path / "dst.replaced" / "thesis.tex").read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "dst.replaced"]
        assert sound(source, tmp_path / "dst")

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_directory_that_appears_during_the_run_is_kept(
        self, source: Path, tmp_path: Path, *, overwrite: bool
    ) -> None:
        destination = tmp_path / "dst"

        def appear() -> None:
            destination.mkdir()
            (destination / "thesis.tex").write_text("mine")

        options = ConvertOptions(source, destination, link=LinkMode.COPY, workers=1, overwrite=overwrite)
        with pytest.raises(CheckpointError, match="no checkpoint" if overwrite else "files in it"):
            execute(make_plan(options), AtEnd(appear))

        assert [path.name for path in destination.iterdir()] == ["thesis.tex"]
        # the finished work waits for the place to be free
        shutil.rmtree(destination)
        assert convert(source, destination, "--link", "copy", *["--overwrite"] * overwrite).exit_code == 0
        assert sound(source, destination)

    def test_empty_directory_that_appears_during_the_run_is_used(self, source: Path, tmp_path: Path) -> None:
        destination = tmp_path / "dst"
        execute(make_plan(ConvertOptions(source, destination, workers=1)), AtEnd(destination.mkdir))
        assert sound(source, destination)

    @pytest.mark.parametrize("flags", [["--overwrite"], ["--overwrite", "--nextn", "keep"]])
    def test_replaced_checkpoint_comes_back_when_a_run_was_killed_while_replacing_it(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
    ) -> None:
        destination = tmp_path / "dst"
        assert convert(source, destination, "--link", "copy").exit_code == 0
        before = hashes(destination)
        real, kill = os.rename, KeyboardInterrupt("in place of a kill")

        def rename(old: os.PathLike[str], new: os.PathLike[str]) -> None:
            if Path(new) == destination:
                raise kill
            real(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            assert convert(source, destination, "--link", "copy", "--overwrite").exit_code == 130
        assert not destination.exists()

        class Interrupted(Unwatched):
            def begin(self, file: str, nbytes: int) -> None:
                raise KeyboardInterrupt

        if "keep" in flags:
            # another conversion, interrupted at once: what it discards is not the old checkpoint
            options = ConvertOptions(source, destination, link=LinkMode.COPY, nextn="keep", overwrite=True)
            with pytest.raises(KeyboardInterrupt):
                execute(make_plan(options), Interrupted())
            assert hashes(destination) == before
        assert convert(source, destination, "--link", "copy", *flags).exit_code == 0
        assert sound(source, destination)
        assert [path.name for path in tmp_path.iterdir()] == ["dst"]


class TestForeignPartial:
    def test_link_in_place_of_the_files(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "dst.partial").mkdir()
        (tmp_path / "dst.partial" / "files").symlink_to(source)
        refused(convert(source, tmp_path / "dst"), "symbolic link")
        refused(convert(source, tmp_path / "dst", "--overwrite"), "symbolic link")
        assert not (tmp_path / "dst").exists()

    def test_link_in_place_of_the_partial_directory(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "dst.partial").symlink_to("elsewhere")
        refused(convert(source, tmp_path / "dst"), "symbolic link")
        assert list((tmp_path / "elsewhere").iterdir()) == []

    def test_file_in_place_of_the_partial_directory(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "dst.partial").write_text("mine")
        refused(convert(source, tmp_path / "dst"), "not a directory")
        assert (tmp_path / "dst.partial").read_text() == "mine"

    def test_files_without_a_plan(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "dst.partial" / "files").mkdir(parents=True)
        (tmp_path / "dst.partial" / "files" / "thesis.tex").write_text("mine")
        refused(convert(source, tmp_path / "dst"), "no conversion of weightprep")
        assert (tmp_path / "dst.partial" / "files" / "thesis.tex").exists()

    @pytest.mark.parametrize("flags", [[], ["--overwrite"]])
    @pytest.mark.parametrize("plan", ['{"title": "holidays"}', '{"identity": "0", "parts": 1}'])
    @pytest.mark.parametrize("directory", ["files", "notes"])
    def test_plan_of_something_else(
        self, source: Path, tmp_path: Path, plan: str, directory: str, flags: list[str]
    ) -> None:
        (tmp_path / "dst.partial" / directory).mkdir(parents=True)
        (tmp_path / "dst.partial" / "plan.json").write_text(plan)
        (tmp_path / "dst.partial" / "thesis.tex").write_text("mine")
        refused(convert(source, tmp_path / "dst", *flags), "no conversion of weightprep")
        assert sorted(path.name for path in (tmp_path / "dst.partial").iterdir()) == [
            directory,
            "plan.json",
            "thesis.tex",
        ]

    def test_plan_alone_of_something_else(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "dst.partial").mkdir()
        (tmp_path / "dst.partial" / "plan.json").write_text('{"title": "holidays"}')
        refused(convert(source, tmp_path / "dst", "--overwrite"), "no conversion of weightprep")
        assert (tmp_path / "dst.partial" / "plan.json").exists()

    def test_link_among_the_files_of_an_interrupted_run(self, source: Path, tmp_path: Path) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        options = ConvertOptions(source, tmp_path / "dst", link=LinkMode.COPY, workers=1)
        with pytest.raises(KeyboardInterrupt):
            execute(make_plan(options), AtEnd(interrupt))
        (tmp_path / "dst.partial" / "files" / "sub").symlink_to(source)
        refused(convert(source, tmp_path / "dst", "--link", "copy"), "symbolic link")

    def test_link_in_place_of_the_journal(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "notes").write_text("mine")
        (tmp_path / "dst.partial" / "files").mkdir(parents=True)

        plan = make_plan(ConvertOptions(source, tmp_path / "dst", link=LinkMode.COPY, workers=1))
        with pytest.raises(KeyboardInterrupt):
            execute(plan, AtEnd(lambda: (_ for _ in ()).throw(KeyboardInterrupt)))  # type: ignore[arg-type, misc]
        (journal,) = (tmp_path / "dst.partial").glob("journal-*.jsonl")
        journal.unlink()
        journal.symlink_to(tmp_path / "notes")
        assert convert(source, tmp_path / "dst", "--link", "copy").exit_code == 2
        assert (tmp_path / "notes").read_text() == "mine"


def test_too_little_space_for_the_rest_keeps_what_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    options = ConvertOptions(source, tmp_path / "dst", link=LinkMode.COPY, workers=1)
    with pytest.raises(KeyboardInterrupt):
        execute(make_plan(options), AtEnd(interrupt))
    finished = hashes(tmp_path / "dst.partial" / "files")
    assert len(finished) == 1

    class Full:
        f_bavail, f_frsize = 0, 4096

    with monkeypatch.context() as patch:
        # a disk cannot be filled here without harm to others
        patch.setattr(os, "statvfs", lambda _: Full)
        refused(convert(source, tmp_path / "dst", "--link", "copy"), "0 bytes free")
    assert hashes(tmp_path / "dst.partial" / "files") == finished
    assert convert(source, tmp_path / "dst", "--link", "copy").exit_code == 0
    assert sound(source, tmp_path / "dst")


def test_finished_copies_need_no_space_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    options = ConvertOptions(source, tmp_path / "dst", link=LinkMode.COPY, workers=1)
    plan = make_plan(options)
    with pytest.raises(KeyboardInterrupt):
        execute(plan, AtEnd(interrupt))
    (name,) = hashes(tmp_path / "dst.partial" / "files")
    (size,) = (job.nbytes for job in plan.jobs if job.name == name)

    asked = []
    for target in ("other", "dst"):

        class Full:
            f_bavail, f_frsize = 0, 4096

        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _: Full)
            with pytest.raises(CheckpointError) as error:
                execute(make_plan(ConvertOptions(source, tmp_path / target, link=LinkMode.COPY)), Unwatched())
        asked.append(int(error.value.wanted.split()[0].replace(",", "")))
    assert asked[0] - asked[1] == size


class TestHowTheDestinationIsNamed:
    @pytest.mark.parametrize("name", [".", "sub/..", "../cwd"])
    def test_the_current_directory(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        (tmp_path / "cwd").mkdir()
        monkeypatch.chdir(tmp_path / "cwd")
        if name == "sub/..":
            # sub/.. is the current directory only while sub exists, and then it is not empty
            Path("sub").mkdir()
            refused(convert(source, name), "files in it")
            assert sorted(path.name for path in tmp_path.rglob("*")) == ["cwd", "sub"]
            return
        assert convert(source, name).exit_code == 0
        assert sound(source, tmp_path / "cwd")
        assert [path.name for path in tmp_path.iterdir()] == ["cwd"]

    def test_the_directory_above(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "dst" / "sub").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "dst" / "sub")
        refused(convert(source, ".."), "files in it")
        refused(convert(source, "..", "--overwrite"), "no checkpoint")
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["dst", "sub"]

    @pytest.mark.parametrize("name", ["x" * 248, "x" * 300, "new/" + "x" * 248, "/".join(["x" * 200] * 25)])
    def test_too_long(self, source: Path, tmp_path: Path, name: str) -> None:
        refused(convert(source, tmp_path / name), "shorter")
        assert list(tmp_path.iterdir()) == []

    def test_mount_point(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "dst").mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(tmp_path / "dst")]
        if os.geteuid() or subprocess.run(command, check=False).returncode:
            pytest.skip("cannot mount a tmpfs here; that a mount point is refused before the work is not tried")
        try:
            refused(convert(source, tmp_path / "dst"), "a mount point")
        finally:
            subprocess.run(["umount", str(tmp_path / "dst")], check=True)
        assert [path.name for path in tmp_path.iterdir()] == ["dst"]

    def test_as_long_as_it_may_be(self, source: Path, tmp_path: Path) -> None:
        assert convert(source, tmp_path / ("x" * 247)).exit_code == 0


def test_names_of_source_files_that_are_like_temporary_ones_or_very_long(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src")
    extra = ["config.json.tmp", "model.safetensors.tmp", "README.md.tmp", "README.md.tmp.tmp", "x" * 255]
    for name in extra:
        (source / name).write_text(name)
    assert convert(source, tmp_path / "dst").exit_code == 0
    assert [(tmp_path / "dst" / name).read_text() for name in extra] == extra
    assert sound(source, tmp_path / "dst")


class TestUnreadableDirectory:
    def test_no_permission(self) -> None:
        root = Path(tempfile.mkdtemp())
        user = os.geteuid()
        try:
            root.chmod(0o755)
            (root / "sub").mkdir()
            (root / "sub" / "file").write_text("x")
            (root / "sub").chmod(0)
            if user == 0:
                # root may read everything
                os.seteuid(65534)
            with pytest.raises(CheckpointError, match="sub: found Permission denied"):
                walk_files(root)
        finally:
            os.seteuid(user)
            (root / "sub").chmod(0o700)
            shutil.rmtree(root)

    def test_path_that_is_too_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "src").mkdir()
        monkeypatch.chdir(tmp_path / "src")
        for _ in range(20):
            Path("x" * 250).mkdir()
            monkeypatch.chdir("x" * 250)
        with pytest.raises(CheckpointError, match="File name too long"):
            walk_files(tmp_path / "src")


class TestWhatIsSaid:
    def test_finish_without_parts(self, source: Path, tmp_path: Path) -> None:
        refused(convert(source, tmp_path / "dst", "--finish"), "no conversion in parts was started")
        assert list(tmp_path.iterdir()) == []

    def test_hard_links_share_bytes_with_the_source(self, tmp_path: Path) -> None:
        source = synthesize(tmp_path / "src", shards=10)
        linked = convert(source, tmp_path / "linked", "--link", "hard")
        copied = convert(source, tmp_path / "copied", "--link", "copy")
        assert (linked.exit_code, copied.exit_code) == (0, 0)
        assert "in place changes the source" in linked.stderr
        assert "--link copy" in linked.stderr
        assert "in place" not in copied.stderr

    @pytest.mark.parametrize(("layout", "plain"), [("inline", True), ("sidecar", False)])
    def test_plain_sglang_loads_an_inline_result(
        self, source: Path, tmp_path: Path, layout: str, *, plain: bool
    ) -> None:
        result = convert(source, tmp_path / "dst", "--layout", layout)
        assert result.exit_code == 0
        assert ("without weightprep" in result.stderr) is plain
