"""The teacher-replay actor: sends frozen states to several teachers and returns their answers.

It is a process around `panel.panel`, which sends, pays and caches. States are chosen, votes counted
and pairs made in `rollouts.consensus`. Neither this module nor its imports load torch.
"""

from typing import ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.actor import PanelActor
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply


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
