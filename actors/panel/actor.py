"""The base of the actors that ask language models: one panel, its ceiling and its keys.

These are the only processes of a run with API keys. Neither this module nor its imports load torch.
"""

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
