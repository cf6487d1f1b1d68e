"""A hub of models on the loopback address: as much of it as fetching snapshots needs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Repository:
    """Revisions by name, each the bytes of files by name; `token` is needed to see it, `gated` refuses its
    files.
    """

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, of a tag, or of itself."""
        commits = {name: sha1(repr(sorted(files)).encode() + name.encode()).hexdigest() for name, files in
                   self.revisions.items()}  # fmt: skip
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, commit: str) -> dict[str, bytes]:
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Hub:
    """What is served, and what was asked for: (method, path, token)."""

    repositories: dict[str, Repository]
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> set[str]:
        return {
            path.rpartition("/")[2]
            for method, path, _ in self.asked
            if method == "GET" and "/resolve/" in path
        }


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            hub.asked.append((self.command, path, token))
            parts = path.split("/")
            start = 2 if parts[:2] == ["api", "models"] else 0
            repository = hub.repositories.get("/".join(parts[start : start + 2]))
            if repository is None or repository.token not in (None, token):
                return self.answer(404 if token else 401, b"", {"X-Error-Code": "RepoNotFound"})
            rest = parts[start + 2 :] or ["revision", "main"]
            commit = repository.commit(rest[1])
            if commit is None:
                return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = repository.files(commit)
            if rest[0] == "revision":
                siblings = [{"rfilename": name} for name in files]
                return self.json({"id": "/".join(parts[2:4]), "sha": commit, "siblings": siblings})
            if rest[0] == "tree":
                return self.json(
                    [{"type": "file", "path": n, "size": len(b), "oid": digest(b)} for n, b in files.items()]
                )
            if repository.gated:
                return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            body = files["/".join(rest[2:])]
            return self.answer(200, body, {"ETag": f'"{digest(body)}"', "X-Repo-Commit": commit})

        do_HEAD = do_GET

        def json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def digest(body: bytes) -> str:
    return sha1(body).hexdigest()
