"""Tasks of this project as TRL's `rollout_func`: whole episodes, with tools, errors and rewards.

    rows = Dataset.from_list(episode_rows(800))
    ComposerGRPOTrainer(
        ..., rollout_func=TaskRollouts(task, tokenizer), reward_funcs=reward, train_dataset=rows
    )

A prompt names an episode, as "train/12". TRL samples the tokens of each turn, on its own engine;
all episodes of a batch are played together, turn by turn. Each row gets its `trace`, from which
`ComposerGRPOTrainer` makes hinted contexts, and its `reward`. Imports no TRL.
"""

import statistics
from collections.abc import Sequence
from typing import Any, cast

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.tasks.playing import Sample, Sampled, play_episodes
from composer_mesh.tasks.task import Task


def episode_rows(count: int, split: Split = "train", first: int = 0) -> list[dict[str, str]]:
    """Return the rows of a data set for `TaskRollouts`: one for each episode."""
    return [{"prompt": f"{split}/{index}"} for index in range(first, first + count)]


def episode_reward(
    *, reward: Sequence[float | None], trace: Sequence[Trace], **columns: Any
) -> Any:
    """Return the rewards that the episodes had; logs their success. One of TRL's `reward_funcs`."""
    if (log_metric := columns.get("log_metric")) is not None:
        log_metric("rollouts/success", statistics.mean(one.success for one in trace))
    return list(reward)


class TaskRollouts:
    """Plays the episodes of a task; an object of it is a `rollout_func`.

    `max_context` bounds the ids of an episode, `chat` renders them (the tokenizer's own template
    by default). The longest turn is the trainer's `max_completion_length`.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        max_context: int | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        for part in task.parts:
            if part.group_rewards:
                raise ValueError(
                    f"task {part.name!r} has the group reward {part.group_rewards[0].name!r}, but "
                    "TRL may give the rollouts of a prompt to several processes: make it a reward "
                    "of one rollout, or train with composer-mesh"
                )
        self.task, self.max_context = task, max_context
        self.chat = chat or ChatFormat(tokenizer, task.tools)
        self._played = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any] | None]:
        """Play the episodes of some prompts; return TRL's columns, and `trace` and `reward`."""

        def sample(contexts: list[list[int]]) -> Sampled:
            # TRL offers nothing public that samples from ids.
            found = trainer._generate_single_turn(contexts, None, {}, 1)
            return found[0], found[1]

        episodes = [self._episode(prompt) for prompt in prompts]
        longest = self.max_context or trainer.model.config.max_position_embeddings
        traces = self.play(episodes, sample, longest)
        sampled = all(turn.logprobs for trace in traces for turn in trace.turns)
        first = [len(trace.turns[0].context_ids) for trace in traces]
        ids = [trace.token_ids() for trace in traces]
        pairs = list(zip(traces, first, strict=True))
        return {
            "prompt_ids": [one[:cut] for one, cut in zip(ids, first, strict=True)],
            "completion_ids": [one[cut:] for one, cut in zip(ids, first, strict=True)],
            "env_mask": [list(map(int, trace.action_mask()[cut:])) for trace, cut in pairs],
            "logprobs": [logprobs_of(trace)[cut:] for trace, cut in pairs] if sampled else None,
            "reward": [None if trace.screened else trace.reward for trace in traces],
            "trace": list(traces),
        }

    def play(self, episodes: Sequence[Episode], sample: Sample, longest: int) -> list[Trace]:
        """Play every episode to its end, together; equal neighbours are one group.

        A context of `longest` ids ends an episode without success.
        """
        traces = play_episodes(self.task, self.chat, episodes, sample, longest, self._played)
        self._played = traces[-1].group_id + 1 if traces else self._played
        return traces

    def _episode(self, prompt: Any) -> Episode:
        split, _, index = str(prompt).partition("/")
        if split not in ("train", "heldout") or not index.isdecimal():
            raise ValueError(
                f"a prompt is {prompt!r} but must name an episode, as 'train/12': make the rows "
                "of the data set with episode_rows"
            )
        return self.task.episode(cast("Split", split), int(index))


def logprobs_of(trace: Trace) -> list[float]:
    """Return the log-probs of a trace's ids; 0 where they were not sampled."""
    found: list[float] = []
    for turn in trace.turns:
        found += [0.0] * len(turn.context_ids) + turn.logprobs
    return found
