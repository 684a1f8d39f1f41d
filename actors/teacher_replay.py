"""The teacher-replay actor: sends frozen states to several teachers and returns their answers.

It is a process around `panel.panel`, which sends, pays and caches. States are chosen, votes counted
and pairs made in `rollouts.consensus`. Neither this module nor its imports load torch.
"""

import os
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply


class TeacherReplayActor(MeshActor):
    """One replica of a pool, with its own connections to the teachers and a shared ledger.

    controller -- FrozenState --> TeacherReplayActor == HTTP ==> N teachers
               <-- answers and failures --
    """

    kind: ClassVar[str] = "teacher_replay"

    def __init__(self) -> None:
        self._panel: TeacherPanel | None = None
        self._running = 0

    @concurrent_endpoint
    async def load(self, settings: PanelSettings, keys: Keys | None = None) -> None:
        """Open connections, ledger and cache; raises if a teacher or a file cannot be used.

        Sends no completion request; a provider's price list is read if the settings name no prices.
        Replaces what an earlier `load` opened. Without `keys`, API keys are read from this
        process's environment.
        """
        settings.check_shared()
        panel = await TeacherPanel.open(settings, environ=os.environ if keys is None else keys)
        await self._close_panel()
        self._panel = panel

    @concurrent_endpoint
    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """Query `n` teachers concurrently; the state's seed rotates which ones.

        Waits until each has answered or failed, at most `timeouts.total_s`. A failure is returned
        as a value in the list, and counted; it does not affect other teachers' answers.
        """
        panel = self._loaded()
        self._running += 1
        self.activity = f"asking about {self._running} states"
        try:
            return await panel.ask(state, n)
        finally:
            self._running -= 1
            self.activity = f"asking about {self._running} states" if self._running else "idle"

    @concurrent_endpoint
    async def aclose(self) -> None:
        """Close connections and files. Running queries are cancelled; `load` opens new ones."""
        await self._close_panel()

    def details(self) -> dict[str, Any]:
        return {} if self._panel is None else self._panel.details()

    def _loaded(self) -> TeacherPanel:
        if self._panel is None:
            raise RuntimeError("no teachers are loaded: call load first")
        return self._panel

    async def _close_panel(self) -> None:
        panel, self._panel = self._panel, None
        if panel is not None:
            await panel.aclose()
