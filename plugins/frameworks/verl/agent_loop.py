"""Tasks of this project as an agent loop of verl: whole episodes, their errors and hinted contexts.

    # agent_loops.yaml, the file of `rollout.agent.agent_loop_config_path`
    - name: composer_mesh
      _target_: composer_mesh.plugins.frameworks.verl.agent_loop.TaskAgentLoop
      task: toolbox
      settings: {max_turns: 6, tool_error_penalty: 0.1}

A row names its episode in `extra_info`, as `verl_episode_rows` makes them. Every turn is sampled
from ids by verl's own servers, and nothing is tokenized twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast
from uuid import uuid4

from verl.experimental.agent_loop import agent_loop as verl_loops

from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.configs.sdpo import HintsConfig
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.chat import ChatFormat, encoded
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import ErrorSite, Split, Trace
from composer_mesh.tasks.loading import task_class
from composer_mesh.tasks.playing import PlayedTurn, played_trace
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task, TaskSettings

AGENT_LOOP = "composer_mesh"
VIEW_FIELDS = ("turn", "teacher_ids", "student_rows", "teacher_rows", "targets")


def agent_loops() -> dict[str, Any]:
    """Return verl's registry of agent loops."""
    found: dict[str, Any] = verl_loops._agent_loop_registry
    return found


def verl_episode_rows(count: int, split: Split = "train", first: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a data set of verl for `TaskAgentLoop`: one for each episode.

    The `prompt` is only what verl asks every row for; an episode begins with its task's messages.
    """
    return [
        {
            "data_source": AGENT_LOOP,
            "agent_name": AGENT_LOOP,
            "prompt": [{"role": "user", "content": f"{split}/{index}"}],
            "extra_info": {"index": index, "episode": f"{split}/{index}"},
        }
        for index in range(first, first + count)
    ]


class TaskAgentLoop(verl_loops.AgentLoopBase):
    """Plays one episode of a task; its output trains the sampled ids, by their log-probs.

    `task` is a name or an import path, `options` are the task's own, `settings` those of
    `TaskSettings` and `hints` those of `[sdpo.hints]`. At most `max_sites` errors of a rollout get
    a hint. Extra fields of the output:

        hint_views  for each hinted turn its teacher_ids, student_rows, teacher_rows and targets
        error_mask  for each response id 1 where it belongs to a turn that failed
        success, screened

    A screened rollout has no trained id.
    """

    def __init__(
        self,
        *args: Any,
        task: str = "toolbox",
        options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
        max_sites: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._task = _loaded(
            task, *(json.dumps(_plain(one or {}), sort_keys=True) for one in (options, settings))
        )
        self._chat = ChatFormat(
            self.tokenizer, self._task.tools, options=dict(self.apply_chat_template_kwargs)
        )
        self._hints = HintsConfig.model_validate(_plain(hints or {}))
        self._max_sites = max_sites

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Play the episode of a row; return verl's `AgentLoopOutput`. Waits for every turn."""
        config = self.rollout_config
        game = _Game(RunningEpisode(self._task, self._episode(row)), self._chat)
        try:
            await game.begin(config.prompt_length)
            seconds = await self._play(game, sampling_params, config.response_length)
            outcome = await game.running.outcome()
        finally:
            await game.running.close()
        trace = played_trace(game.running.episode, outcome, game.turns, game.sites)
        return self._output(trace, seconds, config.prompt_length + config.response_length)

    async def _play(self, game: _Game, sampling: Mapping[str, Any], most: int) -> float:
        """Play turns to the end, or to `most` response ids; return the seconds of sampling."""
        seconds, request = 0.0, uuid4().hex
        while not game.done and game.used < most:
            began = time.perf_counter()
            said = await self.server_manager.generate(
                request_id=request,
                prompt_ids=list(game.context),
                sampling_params={**sampling, "max_tokens": most - game.used},
            )
            seconds += time.perf_counter() - began
            left = most - game.used
            logprobs = list(said.log_probs)[:left] if said.log_probs else None
            await game.turn(list(said.token_ids)[:left], logprobs)
        return seconds

    def _output(self, trace: Trace, seconds: float, longest: int) -> Any:
        prompt = len(trace.turns[0].context_ids)
        ids, trained = trace.token_ids(), not trace.screened
        views = hinted_sites(
            [trace] if trained else [],
            self._chat,
            lambda one: one.answer,
            self._max_sites,
            longest,
            self._hints,
        ).views
        logprobs = [
            value
            for turn in trace.turns
            for value in [0.0] * len(turn.context_ids) + list(turn.logprobs)
        ]
        failed = {site.turn for site in trace.error_sites}
        return verl_loops.AgentLoopOutput(
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            response_mask=[int(one and trained) for one in trace.action_mask()[prompt:]],
            response_logprobs=logprobs[prompt:],
            reward_score=trace.reward,
            num_turns=2 * len(trace.turns),
            metrics=verl_loops.AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={
                "hint_views": [{name: getattr(one, name) for name in VIEW_FIELDS} for one in views],
                "error_mask": _mask_of(trace, failed)[prompt:],
                "success": trace.success,
                "screened": trace.screened,
                # verl's own loops have these two keys, and its batches want equal keys.
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    def _episode(self, row: Mapping[str, Any]) -> Episode:
        name = str((row.get("extra_info") or {}).get("episode"))
        split, _, index = name.partition("/")
        if split not in ("train", "heldout") or not index.isdecimal():
            raise ValueError(
                f"extra_info.episode of a row is {name!r} but must name an episode, as "
                "'train/12': make the rows of the data set with verl_episode_rows"
            )
        return self._task.episode(cast("Split", split), int(index))


def view_of(fields: Mapping[str, Any]) -> HintedView:
    """Return one of the extra field `hint_views` as a hinted view."""
    return HintedView("", **{name: fields[name] for name in VIEW_FIELDS})


@dataclass
class _Game:
    """One episode under way, and its ids."""

    running: RunningEpisode
    chat: ChatFormat
    done: bool = False
    used: int = 0
    turns: list[PlayedTurn] = field(default_factory=list)
    sites: list[ErrorSite] = field(default_factory=list)
    context: list[int] = field(default_factory=list)

    async def begin(self, most: int) -> None:
        """Start the episode; refuse a first prompt of more than `most` ids."""
        messages = await self.running.begin()
        self._fresh = await encoded(messages, lambda: self.chat.first_prompt(messages))
        if len(self._fresh) > most:
            episode = self.running.episode
            raise ValueError(
                f"{episode.split}/{episode.index} begins with {len(self._fresh)} tokens, but "
                f"rollout.prompt_length is {most}: raise it, or leave the row out"
            )
        self.context = list(self._fresh)

    async def turn(self, answer: list[int], logprobs: list[float] | None) -> None:
        """Apply what was sampled."""
        self.turns.append((self._fresh, answer, logprobs))
        step = await self.running.step(self.chat.action_text(answer))
        if step.error is not None:
            self.sites.append(step.error)
        self.done, self._fresh = step.done, []
        if not step.done:
            self._fresh = await encoded(
                step.messages, lambda: self.chat.continuation(step.messages, answer)
            )
        self.context += answer + self._fresh
        self.used += len(answer) + len(self._fresh)


def _mask_of(trace: Trace, turns: set[int]) -> list[int]:
    found: list[int] = []
    for place, turn in enumerate(trace.turns):
        found += [0] * len(turn.context_ids) + [int(place in turns)] * len(turn.action_ids)
    return found


def _plain(table: Any) -> Any:
    """Return what a YAML file gave, without the containers of OmegaConf."""
    if isinstance(table, Mapping):
        return {str(name): _plain(one) for name, one in table.items()}
    if isinstance(table, Sequence) and not isinstance(table, str):
        return [_plain(one) for one in table]
    return table


@lru_cache(maxsize=16)
def _loaded(name: str, options: str, settings: str) -> Task:
    """Load a task once in a process: verl makes an agent loop for each rollout."""
    own = TaskSettings(**json.loads(settings))
    return task_class(name).create(own, **json.loads(options))
