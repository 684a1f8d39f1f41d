"""The actors that ask language models: teachers for replay, judges for rewards, a hint writer.

Each is a process around `panel.panel`, which sends, pays and caches, with one ceiling. These are
the only processes of a run with API keys: tasks, whose code comes from users, run elsewhere. States
are chosen, votes counted and pairs made in `rollouts.consensus`; prompts of the hint writer are in
`rollouts.hints`, and whether a hint may be used is decided elsewhere. Neither this module nor its
imports load torch.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.budget import BudgetReport
from composer_mesh.rollouts.hints import HintReply, HintRequest, one_line_hint
from composer_mesh.rollouts.pairs import FrozenState, TeacherFailure, TeacherReply
from composer_mesh.rollouts.traces import Message

NO_TEXT = "its answer holds no plain text"


class PanelActor(MeshActor):
    """One replica of a pool, with its own connections to the models and a shared ledger.

    `doing` is its activity while requests run, with their number in place of {}.
    """

    doing: ClassVar[str]

    def __init__(self) -> None:
        self._panel: TeacherPanel | None = None
        self._running = 0

    @concurrent_endpoint
    async def load(self, settings: PanelSettings, keys: Keys | None = None) -> None:
        """Open connections, ledger and cache; raises if a model or a file cannot be used.

        Sends no completion request; a provider's price list is read if the settings name no prices.
        Replaces what an earlier `load` opened. Without `keys`, API keys are read from this
        process's environment.
        """
        settings.check_shared()
        panel = await TeacherPanel.open(settings, environ=os.environ if keys is None else keys)
        await self._close_panel()
        self._panel = panel
        self._count(0)

    @concurrent_endpoint
    async def report(self) -> BudgetReport:
        """Return what the run has spent on these models, over all its processes."""
        return await self._loaded().report()

    @concurrent_endpoint
    async def aclose(self) -> None:
        """Close connections and files. Running requests are cancelled; `load` opens new ones."""
        await self._close_panel()

    def details(self) -> dict[str, Any]:
        return {} if self._panel is None else self._panel.details()

    @contextmanager
    def _asking(self, requests: int = 1) -> Iterator[TeacherPanel]:
        """Yield the panel for a block that sends so many requests."""
        panel = self._loaded()
        self._count(requests)
        try:
            yield panel
        finally:
            self._count(-requests)

    def _count(self, more: int) -> None:
        self._running += more
        self.activity = self.doing.format(self._running) if self._running else "idle"

    def _loaded(self) -> TeacherPanel:
        if self._panel is None:
            raise RuntimeError(f"the {self.kind} is not loaded: call load first")
        return self._panel

    async def _close_panel(self) -> None:
        panel, self._panel = self._panel, None
        if panel is not None:
            await panel.aclose()


class TeacherReplayActor(PanelActor):
    """One replica of a pool, with its own connections to the teachers and a shared ledger.

    controller -- FrozenState --> TeacherReplayActor == HTTP ==> N teachers
               <-- answers and failures --
    """

    kind: ClassVar[str] = "teacher_replay"
    doing: ClassVar[str] = "asking about {} states"

    @concurrent_endpoint
    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """Query `n` teachers concurrently; the state's seed rotates which ones.

        Waits until each has answered or failed, at most `timeouts.total_s`. A failure is returned
        as a value in the list, and counted; it does not affect other teachers' answers.
        """
        with self._asking() as panel:
            return await panel.ask(state, n)


class JudgeActor(PanelActor):
    """One replica of a pool, with its own connections to the judges and a shared ledger.

    environment -- question --> JudgeActor == HTTP ==> a judge
                <-- answer, or why there is none --
    """

    kind: ClassVar[str] = "judge"
    doing: ClassVar[str] = "asking {} questions"

    @concurrent_endpoint
    async def ask(self, judge: str, messages: list[Message]) -> TeacherReply:
        """Return a judge's answer; a failure is returned as a value. Waits at most `total_s`."""
        with self._asking() as panel:
            return await panel.ask_one(judge, messages)

    def _count(self, more: int) -> None:
        super()._count(more)
        if self._panel is not None:
            budget = self._panel.details()["budget"]
            spent = f"${budget['spent_usd']:.4f} of ${budget['ceiling_usd']:,.2f} spent"
            self.activity = f"{self.activity}, {spent}"


class HintWriterActor(PanelActor):
    """One per run, only with writer = "llm": it has a language model write hints for error sites.

    Every request gets a reply; a failure is a reply without text, because templates are the
    fallback.

    controller -- HintRequests --> HintWriterActor == HTTP ==> one model
               <-- HintReplies --
    """

    kind: ClassVar[str] = "hint_writer"
    doing: ClassVar[str] = "wording {} hints"

    @concurrent_endpoint
    async def write(self, requests: list[HintRequest]) -> list[HintReply]:
        """Return one reply per request, in order. Waits at most `timeout_s` for all of them."""
        with self._asking(len(requests)) as panel:
            writer = panel.teachers[0].name
            asking = (panel.ask_one(writer, request.messages) for request in requests)
            return [hint_reply(reply) for reply in await asyncio.gather(*asking)]


def hint_reply(reply: TeacherReply) -> HintReply:
    """Return the hint in a model's answer; one without text says why."""
    if isinstance(reply, TeacherFailure):
        return HintReply("", "none", reply.sent, reply.usd, f"{reply.kind.value}: {reply.text}")
    text, sent = one_line_hint(reply.action_text), not reply.cached
    if not text:
        return HintReply("", "none", sent, reply.usd, NO_TEXT)
    return HintReply(text, "llm" if sent else "cached", sent, reply.usd)
