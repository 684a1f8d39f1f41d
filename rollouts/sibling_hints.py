"""A successful sibling rollout as a hint: what it did before its answer, in a few lines.

Only calls that worked are shown, with their results, up to the first line that would tell the
verified answer; that one and all behind it are left out, and the hint says so. The sibling's own
words are left out too. Which rollout fails, and where the hint goes, is `hint_sources`' business.
"""

import json
from collections.abc import Iterator, Sequence

from composer_mesh.rollouts.hints import PREFIX, HintLeak
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.tool_calls import ToolCall, message_text, parse_action
from composer_mesh.rollouts.traces import Message, Trace

OPENING = "Another try succeeded. It began like this:"
REST = "The rest is left out. Do the next steps yourself."


def chosen_sibling(failed: Trace, group: Sequence[Trace]) -> Trace | None:
    """The successful rollout of the same prompt that shows most for least; never `failed` itself.

    The highest reward wins, then the fewest turns, then the first sample: the order of `group`
    does not matter.
    """
    others = [
        trace
        for trace in group
        if trace.success
        and trace.turns
        and trace.group_id == failed.group_id
        and trace.trace_id != failed.trace_id
    ]
    return min(others, key=lambda t: (-t.reward, len(t.turns), t.sample), default=None)


def sibling_hint(sibling: Trace, answer: str) -> str | None:
    """The hint that a sibling makes; None where it made no call before its answer.

    Raises HintLeak where its first line already tells the answer.
    """
    lines: list[str] = []
    every = list(_worked(sibling))
    for call, result in every:
        if holds_answer(call, answer):
            break
        if holds_answer(result, answer):
            lines.append(call)
            break
        lines.append(f"{call} gave {result}")
    if not every:
        return None
    if not lines:
        raise HintLeak(f"the first call of {sibling.trace_id} holds the answer {answer}")
    return PREFIX + " ".join([OPENING, *(f"{line}." for line in lines), REST])


def exchanges(trace: Trace) -> list[tuple[Message, Message | None]]:
    """Each turn's assistant message with the environment's answer, None where it gave none."""
    messages = trace.messages
    places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    # An opening may hold assistant messages that nobody sampled.
    own = places[len(places) - len(trace.turns) :] if len(places) >= len(trace.turns) else []
    following = [messages[n + 1] if n + 1 < len(messages) else None for n in own]
    return [(messages[n], after) for n, after in zip(own, following, strict=True)]


def _worked(trace: Trace) -> Iterator[tuple[str, str]]:
    """The calls before the last turn that left no error, with their results."""
    failed = {site.turn for site in trace.error_sites}
    for turn, (message, answer) in enumerate(exchanges(trace)[:-1]):
        call = _call_of(message)
        if call is not None and answer is not None and turn not in failed:
            body = {"name": call.name, "arguments": call.arguments}
            yield json.dumps(body, ensure_ascii=False), str(answer.get("content") or "")


def _call_of(message: Message) -> ToolCall | None:
    try:
        action = parse_action(message_text(message))
    except ValueError:
        return None
    return action if isinstance(action, ToolCall) else None
