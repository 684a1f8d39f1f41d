"""What a daemon says of the files that a container changed."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from composer_mesh.plugins.harbor.containers import engines
from composer_mesh.plugins.harbor.containers.engines import EngineContainer
from composer_mesh.plugins.harbor.containers.port import ContainerError

FOLDERS = {"/logs", "/logs/verifier", "/usr", "/usr/bin"}
CHANGES = [
    *({"Path": path, "Kind": 1} for path in ("/logs", "/logs/verifier", "/app/new.txt")),
    *({"Path": path, "Kind": 0} for path in ("/usr", "/usr/bin", "/usr/bin/cat", "/app")),
    *({"Path": path, "Kind": 2} for path in ("/usr/lib/python3.11", "/etc/motd")),
]


class Api:
    """Answers two requests of a daemon."""

    def __init__(self) -> None:
        self.changes: Any = CHANGES

    async def call(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        assert (method, path) == ("GET", "/containers//changes")
        return {} if self.changes is None else {"answer": self.changes}

    def stream(self, method: str, _path: str, params: dict[str, str]) -> Any:
        assert method == "HEAD"
        mode = 1 << 31 if params["path"] in FOLDERS else 0o644
        stat = base64.b64encode(json.dumps({"mode": mode}).encode()).decode()
        return Answer(httpx.Response(200, headers={"X-Docker-Container-Path-Stat": stat}))


class Answer:
    """An answer as a context."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def __aenter__(self) -> httpx.Response:
        return self._response

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.fixture
def container() -> EngineContainer:
    made = EngineContainer.__new__(EngineContainer)
    made._api, made._id = Api(), ""  # type: ignore[assignment]
    return made


async def test_folders_are_left_out_unless_they_were_removed(container: EngineContainer) -> None:
    assert await container.changes() == {
        "/app/new.txt": "added",
        "/usr/bin/cat": "changed",
        "/usr/lib/python3.11": "removed",
        "/etc/motd": "removed",
    }


async def test_an_unchanged_container_has_no_changes(container: EngineContainer) -> None:
    container._api.changes = None  # type: ignore[attr-defined]
    assert await container.changes() == {}


async def test_too_many_changes_are_an_error(
    container: EngineContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "MOST_CHANGES", 3)
    with pytest.raises(ContainerError, match="over 3 files"):
        await container.changes()
