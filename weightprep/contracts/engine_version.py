"""Releases of sglang: which were read, which have plugins, and whether one is in the range that a table's row names."""

from __future__ import annotations

from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from weightprep.errors import EngineError

__all__ = ["READ_RELEASES", "engine_version_of", "is_release_in", "unread_note"]

# The releases whose sources the tables of this package were read from, oldest first.
READ_RELEASES = ("0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
_WITH_PLUGINS = f">={READ_RELEASES[0]}"


def engine_version_of(engine_version: str) -> Version:
    """The version of sglang that `engine_version` names.

    :raises EngineError: not a version, or one without a plugin interface
    """
    try:
        version = Version(engine_version)
    except InvalidVersion:
        version = None
    if version is None or not is_release_in(_WITH_PLUGINS, version):
        raise EngineError(
            f"sglang {engine_version}",
            found="no plugin interface in this version" if version else "not a version",
            wanted=f"a version {_WITH_PLUGINS}",
            remedy="upgrade sglang, or name a version that has plugins",
        )
    return version


def is_release_in(versions: str, version: Version) -> bool:
    """Whether `version` is in the range `versions`, for example ">=0.5.18"; pre-releases count, "" is every release."""
    return _range(versions).contains(version)


@cache
def _range(versions: str) -> SpecifierSet:
    return SpecifierSet(versions, prereleases=True)


def unread_note(engine_version: str) -> str | None:
    """What to tell of predictions for a release above those that were read; None where nothing is to be told."""
    version = Version(engine_version_of(engine_version).public)
    if version <= Version(READ_RELEASES[-1]):
        return None
    return f"gates were read up to {READ_RELEASES[-1]}: sglang {version} may decide otherwise"
