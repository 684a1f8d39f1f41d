"""The hint-writer actor: has a language model write hints for error sites.

It is a process around `panel.panel`, which sends, pays and caches. Prompts are in `rollouts.hints`,
and whether a hint may be used is decided elsewhere. Every request gets a reply; a failure is a
reply without text, because templates are the fallback. Neither this module nor its imports load
torch.
"""

import asyncio
from typing import ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.actor import PanelActor
from composer_mesh.rollouts.hints import HintReply, HintRequest, one_line_hint
from composer_mesh.rollouts.pairs import TeacherFailure, TeacherReply

NO_TEXT = "its answer holds no plain text"


class HintWriterActor(PanelActor):
    """One per run, only with writer = "llm".

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
