"""Hints from a successful sibling rollout: its calls before the answer, in a few lines.

Only calls that worked are shown, with their results, up to the first line that contains the
verified answer; that line and all later ones are omitted, and the hint says so. The sibling's own
words are omitted too. `hint_sources` decides which rollout gets the hint and at which turn.
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
    """Return the best successful rollout of the same prompt and role other than `failed`.

    None without one; a screened rollout is shown to no other. The highest reward wins, then the
    fewest turns, then the lowest sample number: the order of `group` does not matter.
    """
    others = [
        trace
        for trace in group
        if trace.success
        and not trace.screened
        and trace.turns
        and (trace.group_id, trace.role) == (failed.group_id, failed.role)
        and trace.trace_id != failed.trace_id
    ]
    return min(others, key=lambda t: (-t.reward, len(t.turns), t.sample), default=None)


def sibling_hint(sibling: Trace, answer: str | None) -> str | None:
    """Return the hint from a sibling; None if it made no call before its answer.

    Raises HintLeak if its first line already contains the answer.
    """
    lines: list[str] = []
    every = list(_worked(sibling))
    for call, result in every:
        if answer is not None and holds_answer(call, answer):
            break
        if answer is not None and holds_answer(result, answer):
            lines.append(call)
            break
        lines.append(f"{call} gave {result}")
    if not every:
        return None
    if not lines:
        raise HintLeak(f"the first call of {sibling.trace_id} holds the answer {answer}")
    return PREFIX + " ".join([OPENING, *(f"{line}." for line in lines), REST])


def exchanges(trace: Trace) -> list[tuple[Message, Message | None]]:
    """Pair each turn's assistant message with the environment's response, None if there is none."""
    messages = trace.messages
    places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    # The prompt may contain assistant messages that were not sampled.
    own = places[len(places) - len(trace.turns) :] if len(places) >= len(trace.turns) else []
    following = [messages[n + 1] if n + 1 < len(messages) else None for n in own]
    return [(messages[n], after) for n, after in zip(own, following, strict=True)]


def _worked(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield the error-free calls before the last turn, with their results."""
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
