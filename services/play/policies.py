"""Who acts in a played episode: a person, a script, or the task's expert."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.services.checks.task import TimedEpisode
from composer_mesh.services.inspection.page import plain_text

LONGEST_SCRIPT = 1 << 24
HELP = (
    'a line is an answer; /call NAME {"argument": 1} calls a tool, /state shows the conversation, '
    "/quit ends; // begins an answer with a /"
)


class PlayRefused(Exception):
    """The episode cannot be played as asked; the message says why."""


class BadLine(ValueError):
    """A line that is no action; the message says what one is."""


Policy = Callable[[TimedEpisode], str | None]
"""Returns the text of the next action; None ends the episode."""


class Script:
    """The lines of a file, an action each; empty ones are skipped."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, _numbered(path)

    def __call__(self, _episode: TimedEpisode) -> str | None:
        for number, line in self._lines:
            try:
                return action_of(line)
            except BadLine as bad:
                raise PlayRefused(f"--scripted {self._path}, line {number}: {bad}") from None
        return None


@dataclass(frozen=True)
class HumanPolicy:
    """Lines that a person types; `read` returns an empty text at the end of the input."""

    read: Callable[[str], str]
    show_state: Callable[[TimedEpisode], None]
    tell: Callable[[str], None]

    def __call__(self, episode: TimedEpisode) -> str | None:
        turn = sum(message["role"] == "assistant" for message in episode.messages)
        while line := self.read(f"{turn}> "):
            match line.strip():
                case "":
                    self.tell(HELP)
                case "/quit":
                    return None
                case "/state":
                    self.show_state(episode)
                case text:
                    try:
                        return action_of(text)
                    except BadLine as bad:
                        self.tell(str(bad))
        return None


def action_of(line: str) -> str:
    """Return the action that a line stands for; raises BadLine."""
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return line
    word, _, rest = line.partition(" ")
    name, _, written = rest.strip().partition(" ")
    if word != "/call" or not name:
        raise BadLine(f"{plain_text(line, 40)} is no command: {HELP}")
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the arguments of {plain_text(name, 40)} are no JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise BadLine(
            f"the arguments of {plain_text(name, 40)} are a {type(arguments).__name__} but must be "
            'an object: write them as {"name": value}'
        )
    return call_text(name, arguments)


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_regular(path, LONGEST_SCRIPT).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlayRefused(
            f"--scripted {path} cannot be read ({reason}): name a text file with an action a line, "
            "or write expert"
        ) from None
    lines = enumerate(text.splitlines(), 1)
    return iter([(number, line.strip()) for number, line in lines if line.strip()])
