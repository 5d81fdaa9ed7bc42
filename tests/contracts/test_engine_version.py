"""Ranges of releases at their ends, where a row of a table begins or ceases to hold."""

from __future__ import annotations

import pytest
from packaging.version import Version

from weightprep.contracts import READ_RELEASES, unread_note
from weightprep.contracts.engine_version import engine_version_of, is_release_in
from weightprep.errors import EngineError


@pytest.mark.parametrize(
    ("versions", "version", "inside"),
    [
        ("", "0.5.12", True),
        ("", "0.5.24.dev3+g0123abc", True),
        ("<0.5.20", "0.5.19", True),
        ("<0.5.20", "0.5.19.post1", True),
        ("<0.5.20", "0.5.20", False),
        # what is built on the way to a release is taken for it
        ("<0.5.20", "0.5.20rc1", False),
        (">=0.5.18", "0.5.18", True),
        (">=0.5.18", "0.5.17.post2", False),
        (">=0.5.18", "0.5.19.dev1", True),
    ],
)
def test_ends_of_ranges(versions: str, version: str, inside: bool) -> None:
    assert is_release_in(versions, Version(version)) is inside


@pytest.mark.parametrize("version", [*READ_RELEASES, "0.5.13.dev0", "0.5.24rc1", "0.6.0"])
def test_releases_with_plugins(version: str) -> None:
    assert engine_version_of(version) == Version(version)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.11.post3", "0.5.12rc1", "0.5", "0.5.x", ""])
def test_releases_without_and_what_is_no_version(version: str) -> None:
    with pytest.raises(EngineError, match=r">=0\.5\.12"):
        engine_version_of(version)


def test_only_a_release_above_those_that_were_read_has_a_note() -> None:
    assert [unread_note(version) for version in READ_RELEASES] == [None] * len(READ_RELEASES)
    assert unread_note(f"{READ_RELEASES[-1]}+rocm720") is None
    assert "sglang 0.5.24 may decide otherwise" in (unread_note("0.5.24") or "")
