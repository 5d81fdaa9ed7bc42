"""Which engine's gates a forecast is made with, where nobody may have named one: the one that is installed."""

from __future__ import annotations

from dataclasses import dataclass

from weightprep.contracts import READ_RELEASES, unread_note
from weightprep.errors import EngineError

__all__ = ["ChosenEngine", "choose_engine"]


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """A release of sglang.

    :param source: why this one
    :param note: what is to be told of predictions for it, None for nothing
    """

    version: str
    source: str
    note: str | None

    @property
    def name(self) -> str:
        return f"sglang=={self.version}"


def choose_engine(asked: str | None) -> ChosenEngine:
    """The engine `asked` for as sglang==VERSION; else the sglang that is installed, else the newest that was read.

    :raises EngineError: another engine, no version, or one without a plugin interface
    """
    from weightprep.engines.sglang.versions import gates_version, installed_version, is_release

    if asked is None:
        installed, version = installed_version(), str(gates_version())
        if installed is None:
            source = "none is installed: the newest that was read"
        elif is_release(installed):
            source = "installed here"
        else:
            source = f"the newest that was read: {installed}, which is installed, names no release"
        return ChosenEngine(version, source, unread_note(version))
    name, separator, version = asked.partition("==")
    if name != "sglang" or not separator:
        raise EngineError(
            f"--engine {asked}",
            found="an engine without gates here",
            wanted="sglang==VERSION",
            remedy=f"for example --engine sglang=={READ_RELEASES[-1]}",
        )
    return ChosenEngine(version, "asked for", unread_note(version))
