"""A server on 127.0.0.1 that speaks the few hub routes that fetching a model needs, and misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves the directory `root` as the repository org/name, with its large files behind a redirect as a CDN does.

    :ivar cuts: connections to drop after half of the bytes, still to come, for shards
    :ivar ignore_range: answer 200 with the whole file
    :ivar shift_range: answer with the bytes that many after those that were asked for
    :ivar requests: (method, path, Range) of everything that was asked
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.reset(root)

    def reset(self, root: Path) -> None:
        """Behave, forget what was asked, and serve another directory."""
        self.root = root
        self.cuts = 0
        self.ignore_range = False
        self.shift_range = 0
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlparse(self.path).path
        with self.server.lock:
            self.server.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/api/models/org/gated") or path.startswith("/org/gated/"):
            return self._error(403, "GatedRepo", "Access to this repository is restricted")
        if not path.startswith(("/api/models/org/name", "/org/name/", "/cdn/")):
            return self._error(401 if "private" in path else 404, "RepoNotFound", "Repository not found")
        if re.fullmatch(r"/api/models/org/name/revision/(absent)", path) or "/resolve/absent/" in path:
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        names = sorted(p.relative_to(self.server.root).as_posix() for p in self.server.root.rglob("*") if p.is_file())
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": (self.server.root / name).stat().st_size, "oid": _etag(name)}
                for name in names
            ]
            return self._json(entries)
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in names]
            return self._json({"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings})
        if path.startswith("/cdn/"):
            return self._file(path.removeprefix("/cdn/"))
        name = re.sub(r"^/org/name/resolve/[^/]+/", "", path)
        if name not in names:
            return self._error(404, "EntryNotFound", "Entry not found")
        if name.endswith(".safetensors"):
            return self._redirect(name)
        return self._file(name)

    def _file(self, name: str) -> None:
        content = (self.server.root / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        begin, end = 0, len(content)
        if asked and not self.server.ignore_range:
            begin, end = (
                int(asked[1]) + self.server.shift_range,
                min(int(asked[2] or len(content) - 1) + 1, len(content)),
            )
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self._common(name)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = content[begin:end]
        with self.server.lock:
            cut = self.server.cuts > 0 and name.endswith(".safetensors")
            self.server.cuts -= cut
            self.server.sent += len(body) // 2 if cut else len(body)
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
            self.connection.close()

    def _redirect(self, name: str) -> None:
        self.send_response(302)
        self.send_header("Location", f"{self.server.url}/cdn/{name}")
        self._common(name)
        self.send_header("X-Linked-Size", str((self.server.root / name).stat().st_size))
        self.send_header("X-Linked-ETag", f'"{_etag(name)}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _common(self, name: str) -> None:
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(name)}"')
        self.send_header("Accept-Ranges", "bytes")

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
