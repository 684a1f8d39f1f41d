"""AReaL's workflows on this project's generators, and its decoupled PPO on ours.

    [rollouts]
    workflow = "composer_mesh.plugins.frameworks.areal:ArealWorkflow"
    options = { make = "my_workflows:make", tokenizer = "path/of/the/model" }

`make(tokenizer)` returns one of AReaL's `RolloutWorkflow` objects, shipped or written for it, which
runs as it is: it gets an engine with `agenerate` and `get_version`, and what it samples is trained
by its ids, log-probs and versions. AReaL itself is imported by `make` alone (docs/areal.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.losses.custom_function import load_function
from composer_mesh.losses.decoupled import Rejection, decoupled_ppo_loss
from composer_mesh.rollouts.generation import GenerationResult
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message, Turn
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.workflow import Engine, Trajectory, Workflow

ROWS = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
"""Keys of a workflow's result that are read; all are [B, T] but rewards, which are [B]."""


def response_class() -> Any:
    """Return AReaL's `ModelResponse`; raises ModuleNotFoundError with what to install."""
    try:
        from areal.api import ModelResponse  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: AReaL requires another torch, so install it without "
            "its dependencies in an environment of its own, as the guide 'AReaL' shows",
            name=error.name,
        ) from None
    return ModelResponse


@dataclass
class GeneratorEngine:
    """What AReaL's workflows call: the episode's generators behind `agenerate`.

    `samples` are all that were drawn, in the order in which they ended.
    """

    engine: Engine
    response: Any
    tokenizer: Any
    samples: list[tuple[list[int], GenerationResult]] = field(default_factory=list)

    async def agenerate(self, req: Any) -> Any:
        """Return AReaL's `ModelResponse` to its `ModelRequest`. Waits for the last token.

        The temperature is the run's own, or 0 for a greedy request; other settings of its sampling
        than `max_new_tokens` and `stop` are those of the run too. Raises ValueError for images and
        for several samples of one request.
        """
        config = req.gconfig
        if config.n_samples != 1:
            raise ValueError(f"n_samples is {config.n_samples}: ask once for each sample")
        if req.image_data:
            raise ValueError("the request has images, but generators here read text alone")
        (found,) = await self.engine.generate(
            list(req.input_ids),
            greedy=config.greedy,
            max_tokens=config.max_new_tokens,
            stop=tuple(config.stop or ()),
        )
        result = found.result
        self.samples.append((found.prompt_ids, result))
        return self.response(
            input_tokens=list(req.input_ids),
            output_tokens=list(result.token_ids),
            output_logprobs=list(result.logprobs),
            output_versions=list(result.versions),
            stop_reason=result.stop_reason,
            tokenizer=req.tokenizer or self.tokenizer,
        )

    def get_version(self) -> int:
        """Return the newest policy version that has answered; 0 before the first answer."""
        return max((max(one.versions) for _, one in self.samples if one.versions), default=0)


class ArealWorkflow(Workflow):
    """Plays episodes by one of AReaL's workflows.

    `make` is the import path of a function that returns it for a tokenizer, which is loaded from
    the folder `tokenizer`. A row of the task is its data; without `messages` in it, those of the
    task's own session are added. A reward of at least `success_at` is a success.
    """

    def __init__(self, make: str, tokenizer: str, success_at: float = 1.0) -> None:
        self._tokenizer = load_tokenizer(Path(tokenizer))
        self._workflow = load_function(make)(self._tokenizer)
        if not callable(getattr(self._workflow, "arun_episode", None)):
            raise UnusableTask(
                f"{make} returned a {type(self._workflow).__name__} without arun_episode: return "
                "one of AReaL's RolloutWorkflow objects"
            )
        self._success_at, self._response = success_at, response_class()

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        """Play an episode; one that the workflow rejects is screened."""
        data, messages = await self._data(episode, engine)
        generators = GeneratorEngine(engine, self._response, self._tokenizer)
        rows = await self._workflow.arun_episode(generators, data)
        if rows is None:
            return [self._rejected(prompt, one, messages) for prompt, one in generators.samples]
        return trajectories(rows, messages, self._text, self._success_at)

    async def _data(self, episode: Episode, engine: Engine) -> tuple[dict[str, Any], list[Message]]:
        data = dict(episode.payload)
        if "messages" not in data:
            async with engine.environment() as environment:
                data["messages"] = environment.messages
                await environment.finish()
        return data, list(data["messages"])

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _rejected(
        self, prompt: list[int], one: GenerationResult, messages: Sequence[Message]
    ) -> Trajectory:
        turn = Turn(prompt, one.token_ids, one.logprobs, one.versions, one.stop_reason)
        said = {"role": "assistant", "content": self._text(one.token_ids)}
        return Trajectory([turn], [*messages, said], 0.0, False, screened=True)


def trajectories(
    rows: Mapping[str, Any],
    messages: Sequence[Message],
    text: Callable[[Sequence[int]], str],
    success_at: float = 1.0,
) -> list[Trajectory]:
    """Return the rows of a workflow's result as trajectories, each run of its mask as a turn.

    Raises UnusableTask for a result without the keys of token-level rows.
    """
    missing = [name for name in ROWS if name not in rows]
    if missing:
        raise UnusableTask(
            f"AReaL's workflow returned {', '.join(sorted(map(str, rows)))}, without "
            f"{', '.join(missing)}: use one that returns token ids, not completions"
        )
    found = []
    for row in range(len(rows["input_ids"])):
        turns = list(_turns(rows, row))
        said = [{"role": "assistant", "content": text(turn.action_ids)} for turn in turns]
        reward = float(rows["rewards"][row])
        found.append(Trajectory(turns, [*messages, *said], reward, reward >= success_at))
    return found


def _turns(rows: Mapping[str, Any], row: int) -> Any:
    shown = [True] * len(rows["input_ids"][row])
    if "attention_mask" in rows:
        shown = [bool(one) for one in rows["attention_mask"][row].tolist()]
    columns = [rows[name][row].tolist() for name in ("loss_mask", *ROWS[:1], *ROWS[2:4])]
    tokens = [one for one, kept in zip(zip(*columns, strict=True), shown, strict=True) if kept]
    context: list[int] = []
    for sampled, run in groupby(tokens, key=lambda one: bool(one[0])):
        _, ids, logprobs, versions = (list(column) for column in zip(*run, strict=True))
        if sampled:
            yield Turn(context, ids, logprobs, versions, "stop")
            context = []
        else:
            context = context + ids


def ppo_actor_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    rejection_sampling: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return our decoupled PPO by the names of AReaL's `ppo_actor_loss_fn`, a mean over the mask.

    `rejection_sampling` has the fields of its RejectionSamplingConfig. Without it the behaviour's
    weight is 1, as there. Rows are [T] or [B, T]; only `logprobs` gets a gradient.
    """
    mask = loss_mask.bool()
    rejection = None if rejection_sampling is None else Rejection(**rejection_sampling)
    sampling = proximal_logprobs if rejection is None else old_logprobs
    found: Tensor = decoupled_ppo_loss(
        logprobs,
        proximal_logprobs,
        sampling,
        advantages,
        mask,
        clip_low=eps_clip,
        clip_high=eps_clip if eps_clip_higher is None else eps_clip_higher,
        dual_clip=c_clip,
        rejection=rejection,
        normalizer=max(1, int(torch.count_nonzero(mask))),
    ).loss
    return found
