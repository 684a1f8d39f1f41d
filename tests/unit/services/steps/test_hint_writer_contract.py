"""Every implementation of the port `HintWriter` keeps its contract: the fakes, and the mesh's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from in_process_host import InProcessHost
from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.panel_actors import HintWriterActor
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.services.run.pools import MeshHintWriter
from composer_mesh.services.steps.ports import HintWriter

LLM = {"kind": "openai", "base_url": "https://writer.test/v1", "model": "some/model"}


class FakeWriter:
    """Says the same to everyone, or fails for everyone."""

    def __init__(self, works: bool) -> None:
        text, origin = ("Look again.", "llm") if works else ("", "none")
        self.reply = HintReply(text, origin, works, 0.1, "" if works else "it is down")  # type: ignore[arg-type]

    async def write(self, requests: list[HintRequest]) -> list[HintReply]:
        return [self.reply for _ in requests]


class ScriptedHintWriter(HintWriterActor):
    """The real actor, in front of a provider in this process that answers, or is down."""

    works: ClassVar[bool]

    @concurrent_endpoint
    async def load(self, settings: PanelSettings, keys: Keys | None = None) -> None:
        def provider(_: httpx.Request) -> httpx.Response:
            if not self.works:
                return httpx.Response(500, json={"error": {"message": "it is down"}})
            message = {"role": "assistant", "content": "Look again."}
            return httpx.Response(200, json={"choices": [{"index": 0, "message": message}]})

        transport = httpx.MockTransport(provider)
        self._panel = await TeacherPanel.open(settings, environ=keys or {}, transport=transport)


class WorkingWriter(ScriptedHintWriter):
    works: ClassVar[bool] = True


class FailingWriter(ScriptedHintWriter):
    works: ClassVar[bool] = False


@pytest.fixture(params=["works", "is down"])
def works(request: Any) -> bool:
    return bool(request.param == "works")


@pytest.fixture(params=["fake", "MeshHintWriter"])
async def writer(
    request: Any, works: bool, build_config: Any, tmp_path: Path
) -> AsyncIterator[HintWriter]:
    if request.param == "fake":
        yield FakeWriter(works)  # type: ignore[misc]
        return
    pool = await InProcessHost().serve(WorkingWriter if works else FailingWriter)
    config = build_config(sdpo={"alpha": 0.1, "hints": {"writer": "llm", "llm": LLM}})
    mesh_writer = MeshHintWriter(pool, config, Keys({}))
    await mesh_writer.load("", tmp_path)
    yield mesh_writer
    await pool.call("aclose")


async def test_each_request_has_a_reply_in_order_and_a_failure_is_one_without_text(
    writer: HintWriter, works: bool
) -> None:
    requests = [HintRequest([{"role": "user", "content": f"error {n}"}]) for n in range(4)]
    replies = await writer.write(requests)
    assert len(replies) == len(requests)
    for reply in replies:
        assert (reply.text == "Look again.") is works
        assert (reply.origin != "none") is works
        assert bool(reply.reason) is not works


async def test_no_requests_have_no_replies(writer: HintWriter) -> None:
    assert await writer.write([]) == []
