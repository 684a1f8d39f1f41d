"""Thinking in an action's text: what stands in `<think>` tags before the answer.

Ids are continued, so earlier thinking stays in the context, also where the chat template would
leave it out when it renders a conversation anew.
"""

from dataclasses import dataclass

from composer_mesh.rollouts.agent_messages import CLOSE, OPEN
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import text_before_calls


@dataclass(frozen=True)
class ThinkingStyle:
    """How a chat template treats thinking: apart from the answer, or as a part of its text."""

    separate: bool

    @classmethod
    def of(cls, chat: ChatFormat) -> "ThinkingStyle":
        """Probe a chat template."""
        return cls(_separates(chat))

    def split(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer of an action's text.

        An end of thinking inside a call is a part of the call.
        """
        said = text_before_calls(text)
        if not self.separate or not (said.lstrip().startswith(OPEN) or CLOSE in said):
            return "", text
        thinking = said.partition(CLOSE)[0]
        answer = text[len(thinking) :].removeprefix(CLOSE)
        return thinking.lstrip().removeprefix(OPEN).strip(), answer.lstrip()


def _separates(chat: ChatFormat) -> bool:
    """Whether the template reads `reasoning_content`, or drops thinking from a content."""
    asked, mark = [{"role": "user", "content": "q"}], "COMPOSERMESHTHOUGHT"
    apart = {"role": "assistant", "content": "a", "reasoning_content": mark}
    inside = {"role": "assistant", "content": f"{OPEN}{mark}{CLOSE}a"}
    reads = chat.added_by(asked, apart) or ""
    drops = chat.added_by(asked, inside)
    return mark in reads or (drops is not None and mark not in drops)
