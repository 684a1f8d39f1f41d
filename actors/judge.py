"""The judge actor: asks language models for the rewards of tasks, within one dollar ceiling.

It is a process around `panel.panel`, which sends, pays and caches, and the only one with the keys
of judges: tasks, whose code comes from users, run elsewhere. Neither this module nor its imports
load torch.
"""

from typing import ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.actor import PanelActor
from composer_mesh.rollouts.pairs import TeacherReply
from composer_mesh.rollouts.traces import Message


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
