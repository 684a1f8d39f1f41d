"""A hub on this machine for tests: what huggingface_hub's own client asks one for.

Repositories have commits, revisions, and may be private or gated. It records every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 34
PATIENT = {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
"""Variables of a client: after ten seconds without an answer it would ask a second time."""
LFS_BYTES = 4096
"""Files of at least so many bytes are in LFS."""

Files = dict[str, bytes]


def commit_of(files: Mapping[str, bytes]) -> str:
    """Return the id of a commit with these files."""
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name])
    return digest.hexdigest()


@dataclass
class Repository:
    """A repository by its commits; `private` and `gated` ones need the token."""

    commits: dict[str, Files] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Let a revision be these files; return the commit."""
        commit = commit_of(files)
        self.commits[commit] = dict(files)
        self.revisions[revision] = commit
        return commit


@dataclass
class Hub:
    """The state of a server: repositories by kind and id, and what was asked for."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    """Files whose next download ends in the middle."""
    failing: bool = False
    """Whether every answer is an error of the server."""
    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)

    def repository(self, name: str, kind: str = "models") -> Repository:
        """Return a repository, which is made if it is new."""
        return self.repositories.setdefault((kind, name), Repository())

    def asked_for(self, part: str) -> list[str]:
        """Return the requests whose address holds a part."""
        return [one for one in self.requests if part in one]


class _Refused(Exception):
    """An answer with a status and the hub's code of the error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answered(self._read)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answered(self._write)

    do_PUT = do_POST

    def _answered(self, answer: Any) -> None:
        address = urlsplit(self.path)
        asked = f"{self.command} {self.path} {self.headers.get('Range', '')}"
        self.hub.requests.append(asked.strip())
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        try:
            if self.hub.failing:
                raise _Refused(500, "Broken")
            answer([unquote(part) for part in address.path.strip("/").split("/")], body)
        except _Refused as refused:
            status, code = refused.args
            self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _repository(self, kind: str, name: str) -> Repository:
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and not self._has_token):
            raise _Refused(401 if not self._has_token else 404, "RepoNotFound")
        return found

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _commit(self, repository: Repository, revision: str) -> str:
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound")
        return commit

    def _read(self, parts: list[str], _: bytes) -> None:
        if parts[:1] == ["api"] and len(parts) >= 4:
            self._about(parts)
        elif "resolve" in parts:
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            self._file(kind, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            raise _Refused(404, "EntryNotFound")

    def _about(self, parts: list[str]) -> None:
        kind, name = parts[1], "/".join(parts[2:4])
        repository = self._repository(kind, name)
        what, revision = [*parts[4:6], "revision", "main"][:2] if parts[4:] else ("", "main")
        commit = self._commit(repository, revision)
        files = repository.commits[commit]
        if what != "tree":
            about = {"id": name, "sha": commit, "private": repository.private, "tags": []}
            self._json({**about, "siblings": [{"rfilename": one} for one in files]})
            return
        folder = "/".join(parts[6:])
        below = {one: files[one] for one in files if one.startswith(f"{folder}/" if folder else "")}
        if not below:
            raise _Refused(404, "EntryNotFound")
        deep = "recursive=true" in self.path.lower()
        depth = len(folder.split("/")) if folder else 0
        self._json([_entry(one, files[one]) for one in below if deep or one.count("/") == depth])

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository(kind, name)
        commit = self._commit(repository, revision)
        if repository.gated and not self._has_token:
            raise _Refused(403, "GatedRepo")
        if path not in repository.commits[commit]:
            raise _Refused(404, "EntryNotFound")
        content = repository.commits[commit][path]
        headers = {"ETag": f'"{_entry(path, content)["oid"]}"', "X-Repo-Commit": commit}
        if len(content) >= LFS_BYTES:
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        start, status = 0, 200
        if said := self.headers.get("Range", "").removeprefix("bytes="):
            start, status = int(said.partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and path in self.hub.cut:
            self.hub.cut.discard(path)
            headers |= {"Content-Length": str(len(content) - start)}
            self._send(status, content[start : start + (len(content) - start) // 2], headers)
            self.close_connection = True
            return
        self._send(status, content[start:], headers)

    def _write(self, parts: list[str], body: bytes) -> None:
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts[:1] == ["objects"]:
            self.hub.objects[parts[1]] = body
            return self._send(200, b"")
        if not self._has_token:
            raise _Refused(401, "RepoNotFound")
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts[-1] == "batch":
            return self._json(self._batch(json.loads(body)))
        name = "/".join(parts[2:4])
        repository = self._repository(parts[1], name)
        if parts[4] == "preupload":
            files = json.loads(body)["files"]
            return self._json({"files": [_mode(one) for one in files]})
        if parts[4] == "branch":
            repository.revisions[parts[5]] = repository.revisions["main"]
            return self._json({})
        commit = self._committed(repository, parts[5], body)
        address = f"{self.hub.url}/{name}/commit/{commit}"
        return self._json({"commitUrl": address, "commitOid": commit})

    def _create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization")
        name = f"{owner}/{asked['name']}" if owner else str(asked["name"])
        repository = self.hub.repository(name)
        if not repository.commits:
            repository.commit({})
        repository.private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self._json({"url": f"{self.hub.url}/{name}", "id": name})

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for one in asked["objects"]:
            upload = {"href": f"{self.hub.url}/objects/{one['oid']}"}
            objects.append({"oid": one["oid"], "size": one["size"], "actions": {"upload": upload}})
        return {"transfer": "basic", "objects": objects}

    def _committed(self, repository: Repository, revision: str, body: bytes) -> str:
        files = dict(repository.commits[self._commit(repository, revision)])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        return repository.commit(files, revision)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if len(content) >= LFS_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _mode(asked: Mapping[str, Any]) -> dict[str, Any]:
    large = asked["size"] >= LFS_BYTES
    mode = "lfs" if large else "regular"
    return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def served() -> Iterator[Hub]:
    """Serve a hub on a free port of loopback."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
