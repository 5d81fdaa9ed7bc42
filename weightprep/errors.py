"""The one exception tree: everything that a user can cause is a WeightprepError that says what to do next.

A message has four parts, always in this order: the subject (a file, a tensor, a key path), what was found, what was
wanted, and the next step. They are separate arguments so that no call site can forget one, and separate attributes so
that `--json` can report them.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import Any

__all__ = [
    "CheckpointError",
    "ContractError",
    "EngineError",
    "Interrupted",
    "QualityError",
    "RecipeError",
    "WeightprepError",
    "did_you_mean",
    "likely_name",
]

# difflib's ratio from which a name counts as a slip for another: one wrong letter in four.
_SIMILAR = 0.75


class WeightprepError(Exception):
    """Base of all errors that weightprep raises on purpose.

    :param subject: the file, tensor or key path that the error is about
    :param found: what was there
    :param wanted: what was expected instead
    :param remedy: the next step for the user
    """

    exit_code = 2

    def __init__(self, subject: object, *, found: str, wanted: str, remedy: str) -> None:
        self.subject = str(subject)
        self.found = found
        self.wanted = wanted
        self.remedy = remedy
        super().__init__(f"{self.subject}: found {found}; wanted {wanted}\n  -> {remedy}")

    def describe(self) -> dict[str, str]:
        """The parts, for JSON."""
        return {
            "type": type(self).__name__,
            "subject": self.subject,
            "found": self.found,
            "wanted": self.wanted,
            "remedy": self.remedy,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are pickled by their positional arguments; these are named."""
        make = functools.partial(type(self), found=self.found, wanted=self.wanted, remedy=self.remedy)
        return make, (self.subject,)


class RecipeError(WeightprepError):
    """A recipe cannot be read, does not compose, or does not fit the model that it is applied to."""


class CheckpointError(WeightprepError):
    """A file of a checkpoint is missing, malformed, inconsistent with the others, or not ours to touch."""


class EngineError(WeightprepError):
    """The serving engine cannot run weightprep the way it was asked to."""


class QualityError(WeightprepError):
    """A conversion lost more accuracy than the recipe's floor allows."""

    exit_code = 1


class ContractError(WeightprepError):
    """Weights do not have the form that a kernel's gate compares with; carries every violation of the model."""

    exit_code = 1


class Interrupted(WeightprepError):
    """Somebody pressed Ctrl-C, or sent SIGINT."""

    exit_code = 130

    def __init__(self, command: str) -> None:
        super().__init__(
            command,
            found="an interruption",
            wanted="the end of the command",
            remedy="what is finished has been kept: run the same command again to go on",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.subject,)


def likely_name(name: str, known: Iterable[str]) -> str | None:
    """The one of the `known` names that the unknown `name` is likely a slip for."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)), None)


def did_you_mean(name: str, known: Iterable[str], remedy: str) -> str:
    """`remedy` for the unknown `name`, behind the likely name where there is one."""
    likely = likely_name(name, known)
    return f"did you mean {likely!r}? {remedy}" if likely else remedy
