"""What a user calls a checkpoint: a path, or a repository on the hub.

Apart from the code that talks to the hub, whose libraries a local conversion does not wait for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["HubSource", "locate", "locate_cached", "parse_hub_source", "web_address"]

# org/name, hf://org/name, with @revision; typer and pathlib turn the two slashes of the scheme into one.
_HUB_ID = re.compile(r"(?:hf:/{1,2})?(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")

# A page of the hub, whose two slashes pathlib has made one, with what follows the name of a branch.
_WEB_ADDRESS = re.compile(
    r"https?:/{1,2}[\w.-]+(?::\d+)?/(?P<repo>[\w.-]+/[\w.-]+)(?:/(?:tree|blob)/(?P<revision>[\w.-]+).*)?/?"
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the hub.

    :param revision: branch, tag or commit
    """

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def web_address(source: str | Path) -> HubSource | None:
    """The repository whose page on the web somebody gave for a checkpoint, None where `source` is none."""
    found = _WEB_ADDRESS.fullmatch(str(source))
    return None if found is None else HubSource(found["repo"], found["revision"] or "main")


def parse_hub_source(source: str | Path) -> HubSource | None:
    """The hub repository that `source` names, None where it is a path; an existing path is always a path."""
    text = str(source)
    found = _HUB_ID.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    return HubSource(found["repo"], found["revision"] or "main")


def locate(source: str | Path) -> Path:
    """The local directory of a checkpoint: `source` itself, or the cached snapshot of a hub repository, downloaded if
    needed.

    :raises CheckpointError: the repository cannot be reached or read, or has no safetensors
    """
    hub = parse_hub_source(source)
    if hub is None:
        return Path(source)
    from weightprep.checkpoint.hub import download

    return download(hub)


def locate_cached(source: str, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """The local directory of a checkpoint without asking the network: `source` itself, or the snapshot of a hub
    repository as far as the cache has it; None where there is neither.

    :param revision: of the repository; None is the one that `source` names, or main
    :param cache_dir: a cache in another place than huggingface_hub's own
    """
    if Path(source).is_dir():
        return Path(source)
    hub = parse_hub_source(source)
    if hub is None:
        return None
    from weightprep.checkpoint.hub import cached

    return cached(replace(hub, revision=revision or hub.revision), cache_dir)
