"""Checkpoints on the Hugging Face hub: a whole snapshot through the hub's own cache, or the headers alone by range
requests.

Looking at a 1.5 TB checkpoint takes its config, its index and some 100 kB of each shard. All of it passes the same
checks as local files; a server may send anything, so no answer is read further than was asked for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from weightprep.checkpoint.config import CONFIG_NAME, HF_QUANT_CONFIG_NAME, read_config_files
from weightprep.checkpoint.header import Header, json_length, parse_header
from weightprep.checkpoint.hub_source import HubSource, parse_hub_source
from weightprep.checkpoint.repository import INDEX_NAME, PICKLE_SUFFIXES, Checkpoint, assemble
from weightprep.errors import CheckpointError

__all__ = ["cached", "download", "open_headers"]

# Covers the header of nearly every published shard in one request.
_FIRST_BYTES = 128 * 2**10
# A connection that is cut loses at most one chunk.
_CHUNK_BYTES = 8 * 2**10
_TIMEOUT_SECONDS = 30.0
_ATTEMPTS = 5
_WORKERS = 8
_HTTP_PARTIAL_CONTENT = 206


def _transport_error() -> type[Exception]:
    """What the HTTP library below the installed huggingface_hub raises when a connection fails.

    The library has changed twice (requests, httpx, httpx2). huggingface_hub's own error derives from that library's, so
    the outermost class that is neither huggingface_hub's nor Python's is its base error, whichever library it is.
    """
    own = ("huggingface_hub", "builtins")
    foreign: list[type[Exception]] = [c for c in HfHubHTTPError.__mro__ if c.__module__.partition(".")[0] not in own]
    return foreign[-1]


_TRANSPORT_ERROR = _transport_error()


def download(hub: HubSource) -> Path:
    """The cached snapshot of a repository, downloaded as far as it is not there.

    A download that was cut off is resumed. Weights in pickles are not fetched.

    :raises CheckpointError: the repository cannot be reached or read, or has no safetensors
    """
    with _explained(hub):
        ignored = [f"*{suffix}" for suffix in PICKLE_SUFFIXES]
        return Path(snapshot_download(hub.repo, revision=hub.revision, ignore_patterns=ignored))


def cached(hub: HubSource, cache_dir: str | None = None) -> Path | None:
    """The snapshot of a repository in the cache as far as it is there, None where nothing of it is; no network.

    :param cache_dir: a cache in another place than huggingface_hub's own
    """
    try:
        # with no file asked for, a snapshot of weights and configs alone is not taken for a download that was cut off
        folder = snapshot_download(
            hub.repo, revision=hub.revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=[]
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def open_headers(source: str | Path) -> Checkpoint:
    """Open a checkpoint for looking at: a local directory, or a hub repository of which only headers and configs are
    fetched.

    The tensors of a hub repository cannot be read; `locate` fetches them. Offline, its cached snapshot is opened.

    :raises CheckpointError: as :meth:`Checkpoint.open`, or the repository cannot be reached
    """
    hub = parse_hub_source(source)
    if hub is None:
        return Checkpoint.open(Path(source))
    if constants.HF_HUB_OFFLINE:
        return Checkpoint.open(download(hub))
    with _explained(hub):
        info = HfApi().model_info(hub.repo, revision=hub.revision)
        # The commit, so that a push between two requests cannot mix two versions.
        pinned = HubSource(hub.repo, info.sha or hub.revision)
        root = Path(str(pinned))
        files = {Path(entry.rfilename): root / entry.rfilename for entry in info.siblings or ()}
        small = {
            name: Path(hf_hub_download(pinned.repo, name, revision=pinned.revision))
            for name in (CONFIG_NAME, HF_QUANT_CONFIG_NAME, INDEX_NAME)
            if name == CONFIG_NAME or Path(name) in files
        }
        config = read_config_files(small[CONFIG_NAME], small.get(HF_QUANT_CONFIG_NAME))

        def read_headers(paths: Mapping[str, Path]) -> dict[str, Header]:
            with ThreadPoolExecutor(_WORKERS) as pool:
                return dict(zip(paths, pool.map(lambda name: _read_header(pinned, name), paths), strict=True))

        return assemble(root, files, config, small.get(INDEX_NAME), read_headers)


def _read_header(hub: HubSource, name: str) -> Header:
    path = Path(str(hub)) / name
    url = hf_hub_url(hub.repo, name, revision=hub.revision)
    start, size = _get_range(url, 0, _FIRST_BYTES, path)
    needed = 8 + json_length(start, size, path)
    if needed > len(start):
        rest, _ = _get_range(url, len(start), needed - len(start), path)
        start += rest
    return parse_header(start, size, path)


def _get_range(url: str, begin: int, count: int, path: Path) -> tuple[bytes, int]:
    """At most `count` bytes of a file from `begin` on, and the size of the whole file; a cut connection is taken up
    again.
    """
    got = bytearray()
    size = None
    failure: Exception | None = None
    for _ in range(_ATTEMPTS):
        wanted = f"bytes={begin + len(got)}-{begin + count - 1}"
        try:
            with _stream(url, {**build_hf_headers(), "Range": wanted, "Accept-Encoding": "identity"}) as response:
                hf_raise_for_status(response)
                total = re.fullmatch(r"bytes (\d+)-\d+/(\d{1,18})", response.headers.get("Content-Range", ""))
                if response.status_code != _HTTP_PARTIAL_CONTENT or not total or int(total[1]) != begin + len(got):
                    raise _unusable(path, "an answer that is not the range that was asked for")
                size = int(total[2])
                for chunk in _chunks(response):
                    got += chunk[: count - len(got)]
                    if len(got) == count:
                        break
        except _TRANSPORT_ERROR as error:
            failure = error
        if size is not None and len(got) >= min(count, size - begin):
            return bytes(got), size
    raise _unusable(path, f"a connection that was cut {_ATTEMPTS} times") from failure


def _unusable(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        found=found,
        wanted="a server that answers range requests",
        remedy="try again later, or download the checkpoint with `hf download` and pass the directory",
    )


@contextlib.contextmanager
def _stream(url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """A response whose body has not been read yet, from httpx (huggingface_hub 1.x) or requests (before)."""
    session: Any = get_session()
    if hasattr(session, "stream"):
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
            yield response
    else:
        with session.get(url, headers=headers, timeout=_TIMEOUT_SECONDS, stream=True) as response:
            yield response


def _chunks(response: Any) -> Iterator[bytes]:
    read = response.iter_bytes if hasattr(response, "iter_bytes") else response.iter_content
    yield from read(_CHUNK_BYTES)


@contextlib.contextmanager
def _explained(hub: HubSource) -> Iterator[None]:
    """Turn what the hub's client raises into a CheckpointError with the next step."""
    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError:
        raise _refused(hub, "a gated repository", "request access on its page, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        remedy = "check the spelling of the name or path; for a private repository run `hf auth login`"
        raise _refused(hub, "no such directory, and no such repository or a private one", remedy) from None
    except RevisionNotFoundError:
        raise _refused(hub, f"no revision {hub.revision!r}", "use a branch, a tag or a commit that it has") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        remedy = "check the network and HF_HUB_OFFLINE, or pass a local directory"
        found = "no such local directory, no connection, and no complete copy in the cache"
        raise _refused(hub, found, remedy) from error
    except EntryNotFoundError as error:
        remedy = "choose a repository that holds a whole model"
        raise _refused(hub, f"a missing file ({_first_line(error)})", remedy) from None
    except (HfHubHTTPError, HFValidationError, OSError, _TRANSPORT_ERROR) as error:
        found = f"no such local directory, and the hub cannot be asked ({type(error).__name__}: {_first_line(error)})"
        raise _refused(hub, found, "check the spelling of the path, or the network and try again") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refused(hub: HubSource, found: str, remedy: str) -> CheckpointError:
    return CheckpointError(hub, found=found, wanted="a checkpoint on the Hugging Face hub", remedy=remedy)
