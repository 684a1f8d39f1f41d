"""No reader of foreign text takes more than linear time, whatever the text repeats.

A text is an opening, a unit that is repeated and an end, of the signs of the reader's format. Its
length doubles until reading can be measured; then it may take at most `MOST_GROWTH` times as long
as a quarter of it: 4 times where time is linear, 16 where it is quadratic. Times are those of the
thread on its processor, so that other programs hardly count.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest

from composer_mesh.actors.provider.endpoint import Secret, TeacherEndpoint
from composer_mesh.actors.provider.reply import ProviderReply, read_reply
from composer_mesh.actors.rollout_workers.openai_chat import ChatRequest, CompletionRequest
from composer_mesh.actors.rollout_workers.openai_wire import read_as
from composer_mesh.configs.regular_files import TomlRefused, parse_toml
from composer_mesh.mesh.json_server import Refusal
from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.plugins.code_tasks.judge.copies import deleted_texts
from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask
from composer_mesh.plugins.code_tasks.texts import PatchFailed, apply_hunks, read_patch
from composer_mesh.plugins.harbor.compose import MOST_BYTES, yaml_node
from composer_mesh.plugins.mcp.stdio import clean
from composer_mesh.plugins.openenv.server.validation import SessionRequestRefused as FrameRefused
from composer_mesh.plugins.openenv.server.validation import client_frame
from composer_mesh.plugins.task_packages.reasoning_gym import last_answer
from composer_mesh.plugins.tinker.server.requests import SampleRequest, parsed
from composer_mesh.rollouts.agent_messages import message_keys, stopped_key
from composer_mesh.rollouts.call_formats.choosing import KNOWN
from composer_mesh.rollouts.call_formats.port import CallFormat
from composer_mesh.rollouts.captured_episode import ThinkingStyle
from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.hints import one_line_hint
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.pair_filters import action_content, shingles, special_ratio, word_count
from composer_mesh.rollouts.tool_calls import assistant_message, parse_calls
from composer_mesh.services.web.errors import RequestRefused
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.judges import json_in

LONGEST = 1 << 17
MEASURABLE_S = 0.1
MOST_GROWTH = 10
COMMON = (" ", "\n", "a", "a ", "0", "1,", "-", ".", '"', "\\", "{", "[", "<", "|")
COMMON += ("<think>", "</think>", "\u0301\u0323", "\u00e9")


@dataclass(frozen=True)
class Reader:
    """What reads a text, and the signs of its format; it raises nothing but `refuses`."""

    name: str
    read: Callable[[str], object]
    signs: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    refuses: tuple[type[Exception], ...] = ()
    longest: int = LONGEST

    def texts(self) -> Iterator[tuple[str, str, str]]:
        units = (*self.signs, *self.openings, *COMMON)
        ends = ("", "x", *self.signs[-1:])
        yield from product(("", *self.openings), dict.fromkeys(units), dict.fromkeys(ends))

    def seconds(self, text: str) -> float:
        began = time.thread_time()
        with contextlib.suppress(*self.refuses):
            self.read(text)
        return time.thread_time() - began

    def slow_length(self, opening: str, unit: str, end: str) -> str:
        """Return a text whose reading takes too long, and its times; "" if none does."""
        count = 1 + (1 << 9) // len(unit)
        while count * len(unit) <= self.longest:
            text = f"{opening}{unit * count}{end}"
            if (took := self.seconds(text)) >= MEASURABLE_S:
                shorter = f"{opening}{unit * (count // 4)}{end}"
                took = min(took, *(self.seconds(text) for _ in range(2)))
                quarter = min(self.seconds(shorter) for _ in range(3))
                if took >= MEASURABLE_S and took > MOST_GROWTH * quarter:
                    return (
                        f"{opening!r}, {unit!r} * {count}, {end!r}: {quarter:.3f} s, {took:.3f} s"
                    )
                return ""
            count *= 2
        return ""


SIGNS = {
    "hermes": ("<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"),
    "qwen_xml": (
        *("<tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>"),
        "</tool_call>",
    ),
    "glm": (
        *("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "</tool_call>",
    ),
    "harmony": ("<|start|>assistant", "<|channel|>", "<|message|>", " to=functions.f", "<|end|>"),
}
OPENINGS = {
    "qwen_xml": (
        *("<tool_call>\n<function=f>\n", "<tool_call><function=f><parameter=a>"),
        *("<tool_call>\n<function=f>\n</function>", "<tool_call>\n<function="),
    ),
    "glm": ("<tool_call>f<arg_key>", "<tool_call>f<arg_key>a</arg_key>"),
    "gemma": ("<|tool_call>call:f{a:", "<start_function_call>call:f{a:", "<|tool_call>call:"),
    "llama_pythonic": ("[f(a=", "[f(a='", "[f"),
    "lfm2": ("<|tool_call_start|>[f(a=", "<|tool_call_start|>[f(a='"),
    "llama_json": ('{"name":"f","parameters":{"a":', '{"name":"f","parameters":{}};'),
}
TAGS = ("<tool_call>", "</tool_call>")
LEAKS = ("4", "4 ", "2+", "(4", "x4", "%4", "forty", "two ", "and ", "dozen ", "<a", "&#", "四")
YAML = (": ", "- ", "&a ", "? ", "'", "|\n", "%", "#", "\t", ">-\n", "a: b\n", "\u2028")
DOTS = (f'a{".b" * 70}="', 'a="', "a=[", "a={")
HUNKS = ("@@ -1 +1 @@\n", " a\n", "+a\n")
TEACHER = TeacherEndpoint("t", "https://provider.test/v1", "some/model", "KEY", max_tokens=100)


def tokens_of(one: CallFormat) -> tuple[str, ...]:
    """Return the tokens of a call format that its fields name."""
    fields = vars(one).values()
    flat = [part for each in fields for part in (each if isinstance(each, tuple) else (each,))]
    return tuple(part for part in flat if isinstance(part, str) and part not in ("", one.name))


def call_formats() -> Iterator[Reader]:
    for at, one in enumerate(KNOWN):
        signs = SIGNS.get(one.name) or tokens_of(one)
        openings = (*OPENINGS.get(one.name, ()), *signs)
        yield Reader(f"{one.name}-{at}", partial(calls_in, one), signs, openings)


def calls_in(one: CallFormat, text: str) -> None:
    one.read(text, {})


def provider(text: str) -> None:
    message = {"choices": [{"message": {"content": text, "role": "assistant"}}]}
    for raw in (text.encode(), json.dumps(message).encode()):
        read_reply(TEACHER, ProviderReply(200, {}, raw, "id", Secret("sk-secret-0123456789")), "c")


def agent_message(text: str) -> None:
    message_keys({"role": "assistant", "content": text})
    stopped_key(text, ["aab", "</think>"])


def requests(text: str) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with contextlib.suppress(Refusal):
            read_as(kind, text.encode())
    with contextlib.suppress(FrameRefused):
        client_frame(text)
    parsed(SampleRequest, text.encode())


def patched(text: str) -> None:
    apply_hunks(text, read_patch(text)[0].hunks)


def repeated_lines(text: str) -> None:
    """Apply a hunk of equal lines, and another one behind them, to more of the same lines."""
    lines = text.count("\n") // 2
    hunk = "@@ -1 +1 @@\n" + " a\n" * lines + " b\n"
    apply_hunks(text, read_patch(f"--- a/f\n+++ b/f\n{hunk}")[0].hunks)


def deleted(text: str) -> None:
    task = JudgedTask("a", {"f.py": text.encode()}, ("f.py",), (), ())
    deleted_texts(task, {"f.py": f"{text}\nbody\n"})


def leaks_of(answer: str, text: str) -> None:
    holds_answer(text, answer)


def filtered(text: str) -> None:
    for measure in (action_content, special_ratio, word_count):
        measure(text)
    shingles(text, 5)


READERS = [
    *call_formats(),
    Reader("calls", parse_calls, TAGS, ('<tool_call error="', '<tool_call error="">\n')),
    Reader("message", lambda text: assistant_message(text, "c", 8), TAGS),
    Reader("action", canonical_action, ("Answer: ", *TAGS)),
    Reader("thinking", ThinkingStyle(separate=True).split),
    Reader("agent-message", agent_message),
    Reader("judge", json_in, ("```json\n", "\n```", "```"), ("```json\n", "<think>")),
    Reader("puzzle", last_answer, ("<answer>", "</answer>")),
    Reader("hint", one_line_hint, ("Hint: ",)),
    Reader("filters", filtered, TAGS, longest=1 << 15),
    Reader("toml", parse_toml, ("a=1\n", "[a]\n", "[[", "''", '"""'), DOTS, (TomlRefused,)),
    Reader("compose", yaml_node, YAML, ("a: ", "a: |\n "), (UnusableTask,), MOST_BYTES),
    Reader("mcp", lambda text: clean(text, 1000)),
    Reader("json", parsed_json, ('{"a":', "[1,"), refuses=(ValueError,)),
    Reader("provider", provider, ('{"a":',)),
    Reader("requests", requests, (), ('{"prompt":[', '{"messages":[', '{"'), (RequestRefused,)),
    Reader("patch", patched, HUNKS, ("--- a/f\n+++ b/f\n",), (PatchFailed,)),
    Reader("deleted-lines", deleted, ("a\n",)),
    Reader("patched-lines", repeated_lines, ("a\n",), (), (PatchFailed,)),
    *(
        Reader(f"leak-{answer}", partial(leaks_of, answer), LEAKS, ("1",), (), 1 << 13)
        for answer in ("42", "-1200.5", "Paris in the spring")
    ),
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_reading_takes_linear_time(reader: Reader) -> None:
    assert [slow for text in reader.texts() if (slow := reader.slow_length(*text))] == []


def test_quadratic_time_is_found() -> None:
    def read(text: str) -> int:
        return sum(text.count("a", at) for at in range(0, len(text), 2))

    assert Reader("quadratic", read).slow_length("", "ab", "").startswith("'', 'ab' * ")
