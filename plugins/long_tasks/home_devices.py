"""The task "home_devices": several functions with typed arguments change the state of a home.

As in BFCL's multi-step tasks only the end state counts, and it is compared as a whole. The
functions that a request needs, in their order, are its variant; held-out variants are not trained.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from composer_mesh.plugins.long_tasks.long_task import UNREPORTED, LongTask, value_or_text
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.mistakes import (
    GIVE_UP,
    Mistake,
    calls_and_results,
    malformed,
    off_by_one,
    quoted_number,
    unknown_tool,
)
from composer_mesh.tasks.planned import PlannedCall, ResultReference, question_of
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.tool import tool

NAMES = [
    "lamp", "fan", "oven", "radio", "pump", "heater", "screen", "kettle", "alarm", "mixer",
]  # fmt: skip
Mode = Literal["eco", "auto", "max"]
MODES: tuple[Mode, ...] = ("eco", "auto", "max")
Level = Annotated[int, Field(ge=0, le=99)]
Minutes = Annotated[int, Field(ge=1, le=99)]
DONE = "ok"
HINTS = {
    "unknown_device": "There is no device {device}. The devices are: {devices}.",
    "device_off": "{device} is off. Switch it on before you set it.",
    "wrong_state": "Not all is as it was asked for. Do every step in order, with its own values.",
}
"""Templates of the hints for this home's errors."""


class Home:
    """Devices by name, each with `on`, `level`, `mode` and `timer` (minutes; 0 is none).

    Raises ToolError `unknown_device` for a name that it does not have, and `device_off` for a
    device whose level or mode is set while it is off.
    """

    def __init__(self, devices: Mapping[str, Mapping[str, Any]]) -> None:
        self.devices: dict[str, dict[str, Any]] = {
            name: dict(copy.deepcopy(state)) for name, state in devices.items()
        }

    def read_level(self, device: str) -> str:
        """Return a device's level."""
        return str(self._of(device)["level"])

    def set_level(self, device: str, level: int) -> str:
        """Set the level of a device that is on."""
        self._running(device)["level"] = level
        return DONE

    def set_mode(self, device: str, mode: Mode) -> str:
        """Set the mode of a device that is on."""
        self._running(device)["mode"] = mode
        return DONE

    def set_timer(self, device: str, minutes: int) -> str:
        """Let a device stop after some minutes."""
        self._of(device)["timer"] = minutes
        return DONE

    def switch(self, device: str, on: bool) -> str:
        """Switch a device on or off."""
        self._of(device)["on"] = on
        return DONE

    def call(self, call: ToolCall) -> str:
        """Do a call that is known to be right."""
        return str(getattr(self, call.name)(**call.arguments))

    def _of(self, device: str) -> dict[str, Any]:
        if device not in self.devices:
            facts = {"device": device[:40], "devices": ", ".join(sorted(self.devices))}
            raise ToolError("unknown_device", f"no device {device[:40]}", facts)
        return self.devices[device]

    def _running(self, device: str) -> dict[str, Any]:
        state = self._of(device)
        if not state["on"]:
            raise ToolError("device_off", f"{device} is off", {"device": device})
        return state


DEVICES = 8
END = "Done."
OTHER_MODES = {"eco": "economy", "auto": "automatic", "max": "maximum"}
OTHER_ARGUMENTS = {"level": "value", "device": "name"}
_SENTENCES = (
    re.compile(r"Set (?P<device>\w+) to (?P<level>\d+)"),
    re.compile(r"Set (?P<device>\w+) to the level of (?P<source>\w+)"),
    re.compile(rf"Put (?P<device>\w+) in (?P<mode>{'|'.join(MODES)}) mode"),
    re.compile(r"Stop (?P<device>\w+) after (?P<minutes>\d+) minutes"),
    re.compile(r"Turn (?P<device>\w+) (?P<on>on|off)"),
)


def plan(request: str) -> list[PlannedCall]:
    """Return the calls that a request asks for; raise ValueError for any other text."""
    steps: list[PlannedCall] = []
    for sentence in request.removesuffix(".").split(". "):
        found = next(filter(None, (one.fullmatch(sentence) for one in _SENTENCES)), None)
        if found is None or not request.endswith("."):
            raise ValueError(f"{request!r} is no request for devices: ask one from `episode`")
        steps += _steps(found.groupdict(), len(steps))
    return steps


def _steps(requested: Mapping[str, str], done: int) -> Iterator[PlannedCall]:
    device = requested["device"]
    if "source" in requested:
        yield PlannedCall("read_level", {"device": requested["source"]})
        yield PlannedCall("set_level", {"device": device, "level": ResultReference(done)})
    elif "level" in requested:
        yield PlannedCall("set_level", {"device": device, "level": int(requested["level"])})
    elif "mode" in requested:
        yield PlannedCall("set_mode", {"device": device, "mode": requested["mode"]})
    elif "minutes" in requested:
        yield PlannedCall("set_timer", {"device": device, "minutes": int(requested["minutes"])})
    else:
        yield PlannedCall("switch", {"device": device, "on": requested["on"] == "on"})


class HomeSession(Session):
    """A home whose devices the agent reads and changes, and which is compared at the end."""

    solved = False

    def start(self) -> None:
        self.home = Home(self.row["devices"])

    @tool
    def read_level(self, device: str) -> str:
        """Reads the level of a device."""
        return self.home.read_level(device)

    @tool
    def set_level(self, device: str, level: Level) -> str:
        """Sets the level of a device."""
        return self.home.set_level(device, level)

    @tool
    def set_mode(self, device: str, mode: Mode) -> str:
        """Sets the mode of a device."""
        return self.home.set_mode(device, mode)

    @tool
    def set_timer(self, device: str, minutes: Minutes) -> str:
        """Stops a device later."""
        return self.home.set_timer(device, minutes)

    @tool
    def switch(self, device: str, on: bool) -> str:
        """Switches a device."""
        return self.home.switch(device, on)

    def reply(self, text: str) -> Reply:
        if text.strip() != END:
            return Reply(error=ToolError("no_answer", "not done"))
        self.solved = self.home.devices == self.row["wanted"]
        if self.solved:
            return Reply()
        task = cast(HomeDevices, self.task)
        return Reply(
            error=task.located(ToolError("wrong_state", "not as asked"), self.conversation)
        )


class HomeDevices(LongTask):
    """Episodes by seed, of `calls` calls. The functions in their order decide the split."""

    name = "home_devices"
    session_class = HomeSession
    hint_templates: ClassVar[Mapping[str, str]] = {**HINTS, **UNREPORTED}

    def plan(self, question: str) -> list[PlannedCall]:
        return plan(question)

    def result_of(self, content: str) -> Any:
        return value_or_text(content)

    def last_words(self, results: Sequence[Any]) -> str:
        return END

    def words_of_steps(self, question: str) -> list[str]:
        words = list[str]()
        for sentence in question.removesuffix(".").split(". "):
            _, level, device = sentence.partition("the level of ")
            words += [level + device, sentence] if device else [sentence]
        return words

    def generate(self, rng: random.Random) -> Row:
        sentences = None
        while sentences is None:  # few devices that are on may not need enough calls
            devices = {name: _state(rng) for name in rng.sample(NAMES, DEVICES)}
            sentences = _sentences(rng, devices, self.calls)
        question = f"{'. '.join(sentences)}."
        wanted = Home(devices)
        _played(plan(question), wanted)
        return {"question": question, "devices": devices, "wanted": wanted.devices}

    def identity(self, row: Row) -> str:
        """Return the row's variant: the functions that it needs, in their order."""
        return " ".join(step.tool for step in plan(row["question"]))

    @reward
    def solved(self, transcript: Transcript) -> float:
        """1 for a home that is as it was requested."""
        return float(cast(HomeSession, transcript.session).solved)

    def gold(self, row: Row) -> Sequence[str]:
        calls = _played(plan(row["question"]), Home(row["devices"]))
        return [*(call_text(call.name, call.arguments) for call in calls), END]

    def verified_answer(self, episode: Episode) -> str:
        """Return the last call, without which no hint tells the end state."""
        return self.gold(episode.payload)[-2]

    def mistakes_of(self, call: ToolCall) -> Sequence[Mistake]:
        reported: dict[str, list[Mistake]] = {
            "read_level": [unknown_tool, _other_argument],
            "set_level": [_other_argument, quoted_number, unknown_tool],
            "set_mode": [_other_mode, unknown_tool],
            "set_timer": [quoted_number, unknown_tool],
            "switch": [quoted_number, unknown_tool],
        }
        return [*reported[call.name], malformed, _early_end, _other_device, _opposite]

    def wrong_end(self, right: str, messages: list[Message]) -> str:
        """Return the last call once more with another value: one step too many."""
        every = [call for call, _ in calls_and_results(messages)]
        again = every and (_opposite(every[-1], messages) or off_by_one(every[-1], messages))
        return again or GIVE_UP


def _state(rng: random.Random) -> dict[str, Any]:
    return {
        "level": rng.randint(1, 98),
        "on": rng.random() < 0.6,
        "mode": rng.choice(MODES),
        "timer": 0,
    }


def _sentences(
    rng: random.Random, devices: Mapping[str, Mapping[str, Any]], calls: int
) -> list[str] | None:
    """Return sentences that take exactly `calls` calls, each changing what no other one does.

    None where the draw does not come out even.
    """
    free, said = rng.sample(sorted(devices), len(devices)), list[str]()
    while calls > 0 and free:
        device = free.pop()
        kind = rng.choice(["level", "copy", "mode", "timer", "switch"])
        if kind in ("level", "copy", "mode") and not devices[device]["on"]:
            said.append(f"Turn {device} on")
            calls -= 1
        if kind == "copy" and free:
            said.append(f"Set {device} to the level of {free.pop()}")
            calls -= 1
        elif kind == "mode":
            other = [mode for mode in MODES if mode != devices[device]["mode"]]
            said.append(f"Put {device} in {rng.choice(other)} mode")
        elif kind == "timer":
            said.append(f"Stop {device} after {rng.randint(2, 60)} minutes")
        elif kind == "switch":
            said.append(f"Turn {device} {'off' if devices[device]['on'] else 'on'}")
        else:
            level = rng.choice([one for one in range(1, 99) if one != devices[device]["level"]])
            said.append(f"Set {device} to {level}")
        calls -= 1
    return None if calls else said


def _played(steps: Sequence[PlannedCall], home: Home) -> list[ToolCall]:
    """Return a plan's calls after they were done in a home."""
    calls, results = list[ToolCall](), list[Any]()
    for step in steps:
        calls.append(step.call(results))
        results.append(value_or_text(home.call(calls[-1])))
    return calls


def _other_argument(call: ToolCall, _: list[Message]) -> str:
    """Name an argument as another function would."""
    last = list(call.arguments)[-1]
    named = {OTHER_ARGUMENTS[k] if k == last else k: v for k, v in call.arguments.items()}
    return call_text(call.name, named)


def _other_mode(call: ToolCall, _: list[Message]) -> str:
    """Write a mode as it is said and not as it is declared."""
    return call_text(call.name, {**call.arguments, "mode": OTHER_MODES[call.arguments["mode"]]})


def _early_end(_: ToolCall, __: list[Message]) -> str:
    return END


def _other_device(call: ToolCall, messages: list[Message]) -> str | None:
    """Take another device of the request; None where it names no other."""
    named = [word for word in re.findall(r"\w+", question_of(messages)) if word in NAMES]
    other = next((name for name in named if name != call.arguments["device"]), None)
    return other and call_text(call.name, {**call.arguments, "device": other})


def _opposite(call: ToolCall, _: list[Message]) -> str | None:
    """Switch the other way; None for other functions."""
    if call.name != "switch" or not isinstance(call.arguments.get("on"), bool):
        return None
    return call_text(call.name, {**call.arguments, "on": not call.arguments["on"]})
