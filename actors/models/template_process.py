"""Renders the chat template of a model folder in a process that can be ended.

A template is a program of whoever made the model, and can run for ever or ask for all memory; so
can loading a tokenizer. The process has limits of CPU time and memory, gets no keys, and is killed
when it exceeds them. What runs in it is `template_program`.

The chat format of a run's policy in one process, for as long as it is needed.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError

from composer_mesh.actors.models.tokenizer import (
    PANIC,
    BackendTokenizer,
    WrappedTokenizer,
    chat_settings,
    load_tokenizer,
)
from composer_mesh.configs.paths import POLICY_KEY, TEACHER_KEY
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.programs import MOST_ANSWER_BYTES, AnsweringProgram, ProgramFailed
from composer_mesh.planning.model_facts import ModelFacts
from composer_mesh.planning.model_folder import OTHER_TOKENIZER, UnfitModelFolder
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError, Tokenizer
from composer_mesh.rollouts.traces import Message

PROGRAM = "composer_mesh.actors.models.template_program"
DEADLINE_S = 600.0
"""Longest wait for an answer, should its process stand still; its CPU time is limited before."""

MOST_GROWTH = 4
"""A rendering has at most so many times the length of its messages, besides what is fixed."""

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
_REPAIR = "use a tokenizer and a chat template from a trusted source"


@dataclass(frozen=True)
class TemplateLimits:
    """CPU seconds and bytes beyond those in use: to load a folder, and to render messages."""

    load_cpu_s: int = 60
    load_bytes: int = 2 << 30
    render_cpu_s: int = 5
    render_bytes: int = 1 << 30

    def __str__(self) -> str:
        return f"{self.render_cpu_s} s and {self.render_bytes >> 20} MiB"


class TemplateProcess:
    """A process that has loaded the tokenizer of a folder. Close it when it is not needed."""

    def __init__(self, folder: Path, limits: TemplateLimits = TemplateLimits()) -> None:
        """Start it; the folder is loaded by the first request."""
        self._folder, self._limits, self._one = folder.absolute(), limits, threading.Lock()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._program = AnsweringProgram(
            python_module(PROGRAM, str(self._folder), json.dumps(asdict(limits))),
            {**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )

    def check(self, tools: list[dict[str, Any]], hints: bool, chat: dict[str, Any]) -> ModelFacts:
        """Return what is known of the folder's model; `chat` is `PolicyConfig.chat`.

        Raises `UnfitModelFolder` unless the model can be built and its chat template be used.
        """
        request = {"check": {"tools": tools, "hints": hints, "chat": chat}}
        return self._facts(request, "a tokenizer or chat template")

    def check_teacher_of(self, policy: Path | None) -> ModelFacts:
        """Return what is known of the folder's model.

        Raises `UnfitModelFolder` unless it can teach the policy of another folder.
        Without a policy's folder the tokenizers are compared later, when that is made.
        """
        request = {"teacher_of": None if policy is None else str(policy.absolute())}
        return self._facts(request, "a tokenizer", OTHER_TOKENIZER, TEACHER_KEY)

    def _facts(
        self, request: dict[str, Any], what: str, repair: str = _REPAIR, key: str = POLICY_KEY
    ) -> ModelFacts:
        """Return the facts of an answer; `what` may exceed the limits."""
        try:
            found = self._answer(request)
        except ProgramFailed as error:
            why = f"has {what} that exceeds its limits of {self._limits} ({error.said})"
            raise UnfitModelFolder(str(self._folder), why, _REPAIR, key) from None
        if "error" in found:
            raise UnfitModelFolder(str(self._folder), found["error"], repair, key)
        return ModelFacts.of(found["facts"])

    def render(self, messages: list[Message], options: dict[str, Any]) -> str:
        """Return the rendered messages; the template takes `date` for today's.

        Raises TemplateError where the template refuses them, else `ChatTemplateError`. Waits for
        at most the limit of CPU time.
        """
        try:
            found = self._answer({"messages": messages, "options": options})
        except ProgramFailed as error:
            raise ChatTemplateError(
                f"the chat template of {self._folder} exceeds its limits of {self._limits} "
                f"({error.said}): {_REPAIR}"
            ) from None
        if "refused" in found:
            raise TemplateError(found["refused"])
        if "error" in found:
            raise ChatTemplateError(f"the chat template of {self._folder} {found['error']}")
        return cast(str, found["text"])

    def close(self) -> None:
        """End the process."""
        self._program.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(request).encode()
        most = MOST_ANSWER_BYTES + MOST_GROWTH * len(line)
        with self._one:  # long messages are encoded in threads
            return json.loads(self._program.ask(line, DEADLINE_S, most))


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Make errors of a tokenizer's native code, which are no `Exception`s, errors of the model.

    Such as a pattern that backtracks: its library gives up one match after 10 million attempts.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise ChatTemplateError(f"the tokenizer fails on a text ({error}): {_REPAIR}") from error


class BoundedTokenizer(WrappedTokenizer):
    """A tokenizer of this process whose chat template is rendered in another one."""

    def __init__(self, tokenizer: Tokenizer, templates: TemplateProcess) -> None:
        super().__init__(tokenizer)
        self._templates = templates

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str:
        return self._templates.render(messages, options)

    def encode(self, text: str, **options: Any) -> list[int]:
        with _panics_as_errors():
            return list(self._tokenizer.encode(text, **options))

    def decode(self, ids: list[int], **options: Any) -> str:
        with _panics_as_errors():
            return str(self._tokenizer.decode(ids, **options))


@asynccontextmanager
async def open_chat(
    config: Config, folder: Path, tools: list[dict[str, Any]]
) -> AsyncIterator[ChatFormat]:
    """Yield the chat format; the template of a foreign model is rendered in its own process.

    Waits seconds for transformers to be imported, in threads: a blocked loop would cost the hosts'
    leases.
    """
    async with AsyncExitStack() as stack:
        loaded = await asyncio.to_thread(load_tokenizer, folder)
        settings = chat_settings(folder, loaded, config.policy.chat)
        tokenizer: Tokenizer = BackendTokenizer(loaded) if loaded.is_fast else loaded
        if config.policy.path is not None:
            templates = TemplateProcess(folder)
            stack.callback(templates.close)
            tokenizer = BoundedTokenizer(tokenizer, templates)
        yield ChatFormat(tokenizer, tools, **settings)
