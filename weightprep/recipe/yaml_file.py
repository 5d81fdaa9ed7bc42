"""Reading a recipe's YAML: plain data only, and no surprise between what is written and what is read.

PyYAML follows YAML 1.1, where the key `on` is the boolean true, a repeated key silently wins, and anchors can blow a
small file up.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import yaml

from weightprep.errors import RecipeError

__all__ = ["parse_yaml", "read_text"]

_MAX_BYTES = 1 << 20
_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """YAML 1.2 booleans, no repeated keys, no aliases."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "an alias, which a recipe may not have", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        mapping = super().construct_mapping(node, deep=True)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a repeated key", node.start_mark)
        return mapping


def read_text(path: Path) -> str:
    """The text of the YAML file `path`.

    :raises RecipeError: no regular file, unreadable, larger than 1 MiB, or not UTF-8
    """
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RecipeError(path, found=found, wanted="a YAML file", remedy="check the path") from None


def parse_yaml(text: str, path: Path) -> dict[str, object]:
    """The mapping that `text` of the file `path` holds.

    :raises RecipeError: malformed, or no mapping from strings
    """
    try:
        # _Loader is a SafeLoader: it makes strings, numbers, booleans, lists and mappings only
        document = yaml.load(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        # PyYAML lets Python's own ValueError out, for a date in month 99 or an integer of 5000 digits.
        place, problem = _problem(error)
        raise RecipeError(f"{path}{place}", found=problem, wanted="a YAML file", remedy="check the syntax") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise RecipeError(path, found=type(document).__name__, wanted="a mapping", remedy="see docs/recipes.md")
    return document


def _problem(error: Exception) -> tuple[str, str]:
    """Where something is wrong, and what, in one line; PyYAML's own text has several."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        return place, str(error.problem or error.context).removeprefix("found ")
    if isinstance(error, yaml.reader.ReaderError):
        return f": character {error.position + 1}", str(error.reason)
    return "", "brackets nested too deeply" if isinstance(error, RecursionError) else str(error)


def _read(path: Path) -> str:
    # Without O_NONBLOCK a FIFO would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecipeError(path, found="no regular file", wanted="a YAML file", remedy="check the path")
    with os.fdopen(fd, "rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise RecipeError(path, found="a file of more than 1 MiB", wanted="a recipe", remedy="check the path")
    return raw.decode("utf-8")
