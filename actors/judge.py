"""The judge actor: asks language models for the rewards of tasks, within one dollar ceiling.

It is a process around `panel.panel`, which sends, pays and caches, and the only one with the keys
of judges: tasks, whose code comes from users, run elsewhere. Neither this module nor its imports
load torch.
"""

import os
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.budget import BudgetReport
from composer_mesh.rollouts.pairs import TeacherReply
from composer_mesh.rollouts.traces import Message


class JudgeActor(MeshActor):
    """One replica of a pool, with its own connections to the judges and a shared ledger.

    environment -- question --> JudgeActor == HTTP ==> a judge
                <-- answer, or why there is none --
    """

    kind: ClassVar[str] = "judge"

    def __init__(self) -> None:
        self._panel: TeacherPanel | None = None
        self._running = 0

    @concurrent_endpoint
    async def load(self, settings: PanelSettings, keys: Keys | None = None) -> None:
        """Open connections, ledger and cache; raises if a judge or a file cannot be used.

        Sends no question. Without `keys`, API keys are read from this process's environment.
        """
        settings.check_shared()
        panel = await TeacherPanel.open(settings, environ=os.environ if keys is None else keys)
        await self._close_panel()
        self._panel = panel
        self._tell()

    @concurrent_endpoint
    async def ask(self, judge: str, messages: list[Message]) -> TeacherReply:
        """Return a judge's answer; a failure is returned as a value. Waits at most `total_s`."""
        panel = self._loaded()
        self._running += 1
        self._tell()
        try:
            return await panel.ask_one(judge, messages)
        finally:
            self._running -= 1
            self._tell()

    @concurrent_endpoint
    async def report(self) -> BudgetReport:
        """Return what the run has spent on judges, over all its processes."""
        return await self._loaded().report()

    @concurrent_endpoint
    async def aclose(self) -> None:
        """Close connections and files. Running questions are cancelled."""
        await self._close_panel()

    def details(self) -> dict[str, Any]:
        return {} if self._panel is None else self._panel.details()

    def _tell(self) -> None:
        budget = self._loaded().details()["budget"]
        spent = f"${budget['spent_usd']:.4f} of ${budget['ceiling_usd']:,.2f} spent"
        work = f"asking {self._running} questions" if self._running else "idle"
        self.activity = f"{work}, {spent}"

    def _loaded(self) -> TeacherPanel:
        if self._panel is None:
            raise RuntimeError("no judges are loaded: call load first")
        return self._panel

    async def _close_panel(self) -> None:
        panel, self._panel = self._panel, None
        if panel is not None:
            await panel.aclose()
