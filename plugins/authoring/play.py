"""Plays one episode in the terminal, by a person, a script or the expert, without model or mesh.

The task's code runs with the time limits and the rules that it has in a run.

Prints a played episode. What a task or a model wrote is printed as plain text.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.provider.errors import ProviderError
from composer_mesh.configs.load import resolve_config, table_of
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import add_import_paths
from composer_mesh.mesh.task_resources import serving, with_tools
from composer_mesh.rollouts.hints import HintTemplateError, HintTemplates, hint_templates
from composer_mesh.rollouts.tasks import Outcome
from composer_mesh.rollouts.tool_calls import call_text, message_text
from composer_mesh.rollouts.traces import ErrorSite, Message, Split
from composer_mesh.services.checks.keys import check_judge_keys
from composer_mesh.services.checks.local_judges import local_judges
from composer_mesh.services.checks.task import TimedEpisode
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.task import Task

LONGEST_SCRIPT = 1 << 24
HELP = (
    '{example} or /call NAME {{"argument": 1}} calls a tool; /state shows the conversation, /quit '
    "ends; any other line is an answer, and // begins one with a /"
)
CONSTANTS = {"true": True, "false": False, "null": None}
"""Values of JSON that a call may have in place of Python's."""
Tools = Mapping[str, Sequence[str]]
"""The names of each tool's parameters, in order."""


class PlayRefused(Exception):
    """The episode cannot be played as requested; the message says why."""


class BadLine(ValueError):
    """A line that is no action; the message says what one is."""


Policy = Callable[[TimedEpisode], str | None]
"""Returns the text of the next action; None ends the episode."""


class Script:
    """The lines of a file, an action each; empty ones are skipped."""

    def __init__(self, path: Path, tools: Tools) -> None:
        self._path, self._lines, self._tools = path, _numbered(path), tools

    def __call__(self, _episode: TimedEpisode) -> str | None:
        for number, line in self._lines:
            try:
                return action_of(line, self._tools)
            except BadLine as bad:
                raise PlayRefused(f"--scripted {self._path}, line {number}: {bad}") from None
        return None


@dataclass(frozen=True)
class HumanPolicy:
    """Lines that a person types; `read` returns an empty text at the end of the input."""

    read: Callable[[str], str]
    show_state: Callable[[TimedEpisode], None]
    tell: Callable[[str], None]
    tools: Tools

    def __call__(self, episode: TimedEpisode) -> str | None:
        turn = sum(message["role"] == "assistant" for message in episode.messages)
        while line := self.read(f"{turn}> "):
            match line.strip():
                case "":
                    self.tell(syntax(self.tools))
                case "/quit":
                    return None
                case "/state":
                    self.show_state(episode)
                case text:
                    try:
                        return action_of(text, self.tools)
                    except BadLine as bad:
                        self.tell(str(bad))
        return None


def tools_of(task: Task) -> Tools:
    """Return the tools of a task and their parameters."""
    functions = [tool["function"] for tool in task.tools]
    return {one["name"]: list(one["parameters"]["properties"]) for one in functions}


def syntax(tools: Tools) -> str:
    """Return what can be typed, with a tool of the task as the example."""
    name, parameters = next(iter(tools.items()), ("NAME", ["argument"]))
    example = f"{name}({', '.join(f'{one}=…' for one in parameters)})"
    return plain_text(HELP.format(example=example))


def action_of(line: str, tools: Tools) -> str:
    """Return the action that a line stands for; raises BadLine."""
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return _call(line.strip(), tools) or line
    word, _, rest = line.partition(" ")
    name, _, written = rest.strip().partition(" ")
    if word != "/call" or not name:
        raise BadLine(f"{plain_text(line, 40)} is not a command: {syntax(tools)}")
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the arguments of {plain_text(name, 40)} are not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise BadLine(
            f"the arguments of {plain_text(name, 40)} are a {type(arguments).__name__} but must be "
            'an object: write them as {"name": value}'
        )
    return call_text(name, arguments)


def _call(line: str, tools: Tools) -> str | None:
    """Return the action of a line such as `add(by=2)`; None if it calls no tool of the task.

    Values are literals, and nothing of the line is evaluated. Raises BadLine.
    """
    name, opened, _ = line.partition("(")
    if not opened or name.strip() not in tools or not line.endswith(")"):
        return None
    parameters = tools[name.strip()]
    try:
        call = ast.parse(line, mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError("it is not a call of one tool")
        if len(call.args) > len(parameters):
            raise ValueError(f"it has {len(call.args)} values for {len(parameters)} parameters")
        given = dict(zip(parameters, map(_value, call.args), strict=False))
        named = {str(word.arg): _value(word.value) for word in call.keywords}
        if twice := given.keys() & named.keys():
            raise ValueError(f"{min(twice)} has two values")
        return call_text(name.strip(), json.loads(json.dumps(given | named, allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        written = ", ".join(f"{one}=VALUE" for one in parameters)
        raise BadLine(
            plain_text(
                f"{line[:60]} is not a call ({reason[:80]}): write {name.strip()}({written}) with "
                "literal values, or // before an answer that looks like one"
            )
        ) from None


def _value(node: ast.expr) -> object:
    """Return the value of a literal; raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)[:40]} is not a literal value") from None


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


LONGEST_LINE = 2_000
MOST_LINES = 200


def title_lines(task: Task, split: str, index: int) -> Iterator[str]:
    """Yield what is played, and the tools of the task."""
    turns = task.settings.max_turns
    yield f"task {plain_text(task.name)}, {split} episode {index}, at most {turns} turns"
    for tool in task.tools:
        function = tool["function"]
        arguments = ", ".join(function["parameters"]["properties"])
        described = " ".join(str(function["description"]).split())
        yield plain_text(f"  {function['name']}({arguments})  {described}", LONGEST_LINE)


def message_lines(messages: Sequence[Message]) -> Iterator[str]:
    """Yield messages with their roles."""
    for message in messages:
        yield from _block(f"[{plain_text(str(message['role']), 20)}] ", _text(message))


def error_lines(site: ErrorSite, templates: HintTemplates) -> Iterator[str]:
    """Yield an error site with its facts and the hint that it would get."""
    facts = "; ".join(f"{name}: {value}" for name, value in site.data.items())
    yield plain_text(
        f"  error {site.error_kind} ({facts})" if facts else f"  error {site.error_kind}"
    )
    yield plain_text(f"  hint ({site.hint_template_key}): {templates.fill(site)}", LONGEST_LINE)


def outcome_lines(task: Task, outcome: Outcome, turns: int, done: bool) -> Iterator[str]:
    """Yield how an episode ended, and each of its rewards."""
    ended = "ended" if done else "was left unfinished"
    success = "success" if outcome.success else "no success"
    yield f"the episode {ended} after {turns} turns: reward {outcome.reward:g}, {success}"
    for one in task.rewards:
        found = outcome.rewards.get(one.name)
        value = "left out" if found is None else f"{found:g}"
        yield plain_text(f"  {one.name}: {value}, weight {one.weight:g}")
    if task.settings.tool_error_penalty:
        yield f"  each error costs {task.settings.tool_error_penalty:g}"


def _text(message: Message) -> str:
    if message["role"] == "assistant":
        return message_text(message)
    content = message.get("content")
    return content if isinstance(content, str) else str(content or "")


def _block(head: str, text: str) -> Iterator[str]:
    lines = text.splitlines() or [""]
    for place, line in enumerate(lines[:MOST_LINES]):
        yield (" " * len(head) if place else head) + plain_text(line, LONGEST_LINE)
    if len(lines) > MOST_LINES:
        yield f"{' ' * len(head)}… ({len(lines):,} lines)"


@dataclass(frozen=True)
class PlayOptions:
    """Which episode is played, and by whom: `scripted` is "expert", a file, or empty.

    With `echo` the actions are shown, which a person has typed in a terminal already.
    """

    episode: int
    split: Split
    scripted: str = ""
    echo: bool = True


def play_command(target: str, overrides: Sequence[str], options: PlayOptions) -> int:
    """Play an episode of a task or of a config's task; the exit status is 0."""
    if options.episode < 0:
        raise PlayRefused(f"--episode is {options.episode} but counts from 0: raise it")
    config = resolve_config(table_of(target, "play"), overrides, target, model_later=True)
    add_import_paths(config.run.import_paths)
    config = with_tools(config)
    task = make_task(config)
    check_judge_keys(config)
    _print(title_lines(task, options.split, options.episode))
    if not options.scripted:
        _print([syntax(tools_of(task))])
    try:
        with serving(config, task), local_judges(config, task, None):
            play(config, task, options, _policy(task, options.scripted), _print)
    except ProviderError as error:
        raise PlayRefused(error.for_role("judge", "judges")) from None
    return 0


def play(
    config: Config,
    task: Task,
    options: PlayOptions,
    policy: Policy,
    show: Callable[[Iterable[str]], None],
) -> None:
    """Play one episode to its end, or until the policy stops, and show each turn."""
    templates = hint_templates(task.hint_templates, config.sdpo.hints.templates)
    chosen = task.pick(options.split, options.episode)
    turns, done = 0, False
    with TimedEpisode(task, chosen, config.environment.call_s) as episode:
        show(message_lines(episode.begin()))
        while not done and (text := policy(episode)) is not None:
            step = episode.step(text)
            turns, done = turns + 1, step.done
            if options.echo:
                show(message_lines([{"role": "assistant", "content": text}]))
            if step.error is not None:
                try:
                    show(error_lines(step.error, templates))
                except HintTemplateError as error:
                    raise UnusableTask(str(error)) from None
            show(message_lines(step.messages))
        show(outcome_lines(task, episode.outcome(), turns, done))


def _policy(task: Task, scripted: str) -> Policy:
    if not scripted:
        return HumanPolicy(
            _read,
            lambda one: _print(message_lines(one.messages)),
            lambda text: _print([text]),
            tools_of(task),
        )
    if scripted != "expert":
        return Script(Path(scripted), tools_of(task))
    if not task.has_expert:
        raise PlayRefused(
            f"--scripted is 'expert' but task {task.name!r} has none: define "
            "expert(self, messages), or name a file with an action a line"
        )
    return TimedEpisode.expert


def _read(prompt: str) -> str:
    sys.stdout.write(prompt)
    sys.stdout.flush()
    return sys.stdin.readline()


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
