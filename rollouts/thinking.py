"""Thinking in an action's text: what stands in `<think>` tags before the answer.

Ids are continued, so earlier thinking stays in the context, also where the chat template would
leave it out when it renders a conversation anew.
"""

from dataclasses import dataclass

from composer_mesh.rollouts.agent_messages import CLOSE, OPEN
from composer_mesh.rollouts.chat import ChatFormat


@dataclass(frozen=True)
class ThinkingStyle:
    """How a chat template treats thinking: apart from the answer, or as a part of its text."""

    separate: bool
    opened: bool
    """The generation prompt opens the tag, so that actions begin inside of it."""

    @classmethod
    def of(cls, chat: ChatFormat) -> "ThinkingStyle":
        """Probe a chat template."""
        return cls(_separates(chat), chat.opens_thought)

    def split(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer of an action's text."""
        begun = text.lstrip().startswith(OPEN)
        if not self.separate or not (begun or self.opened or CLOSE in text):
            return "", text
        thinking, closed, answer = text.partition(CLOSE)
        thinking = thinking.lstrip().removeprefix(OPEN).strip()
        return thinking, answer.lstrip() if closed else ""


def _separates(chat: ChatFormat) -> bool:
    """Whether the template reads `reasoning_content`, or drops thinking from a content."""
    asked, mark = [{"role": "user", "content": "q"}], "COMPOSERMESHTHOUGHT"
    apart = {"role": "assistant", "content": "a", "reasoning_content": mark}
    inside = {"role": "assistant", "content": f"{OPEN}{mark}{CLOSE}a"}
    reads = chat.added_by(asked, apart) or ""
    drops = chat.added_by(asked, inside)
    return mark in reads or (drops is not None and mark not in drops)
