"""Trains the toolbox task from a script like a notebook, by the Tinker SDK alone.

    composer-mesh serve configs/quickstart.toml &
    TINKER_API_KEY=tml-me python examples/tinker_toolbox/train.py http://127.0.0.1:8100

The loop is here: which episodes, which hints, which pairs, which losses. The server has the model,
its adapters and the samplers. With --public the step is sent by losses that every server of the
protocol has, in place of the loss `three_channel`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types

from composer_mesh.plugins.tinker.client import (
    ChatFormat,
    Sampler,
    ThreeChannelStep,
    ToolboxTask,
    hinted_turns,
    pairs_by_vote,
    rollouts_of,
    submit,
    submit_public,
    teacher_topk,
    with_reference,
)

MAX_CONTEXT, MAX_NEW_TOKENS, TOP_K = 384, 40, 20
GROUP, SITES, HELD_OUT = 8, 16, 100


def done(found: Any) -> Any:
    """Return a client, which older SDKs return at once and newer ones as a future."""
    return found.result() if hasattr(found, "result") else found


class Loop:
    """One adapter of the base model, and how it is trained."""

    def __init__(self, url: str, public: bool, rate: float) -> None:
        service = tinker.ServiceClient(base_url=url)
        base = service.get_server_capabilities().supported_models[0].model_name
        self.training: Any = done(service.create_lora_training_client(base, rank=16, seed=1))
        self.base = done(service.create_sampling_client(base_model=base))
        self.task = ToolboxTask()
        self.chat = ChatFormat(self.training.get_tokenizer(), self.task.tools)
        self.adam = types.AdamParams(learning_rate=rate, grad_clip_norm=1.0)
        self.submit = submit_public if public else submit

    def sampler(self, client: Any, temperature: float = 1.0) -> Sampler:
        return Sampler(client, self.chat, MAX_NEW_TOKENS, MAX_CONTEXT, temperature)

    def current(self) -> Any:
        """Return a client that samples from the weights as they are now."""
        return done(self.training.save_weights_and_get_sampling_client())

    def success(self) -> float:
        """Return the share of held-out episodes that end with the right answer."""
        episodes = [self.task.episode("heldout", n) for n in range(HELD_OUT)]
        traces = self.sampler(self.current(), 0.0).play(self.task, episodes)
        return statistics.mean(trace.success for trace in traces)

    def step(self, number: int, prompts: int) -> dict[str, float]:
        """Play, hint, ask and train once; return figures."""
        now = self.current()
        indices = [n for n in range(prompts * number, prompts * (number + 1)) for _ in range(GROUP)]
        traces = self.sampler(now).play(self.task, [self.task.episode("train", n) for n in indices])
        rollouts = rollouts_of(traces)
        turns = hinted_turns(traces, rollouts, self.chat, SITES, MAX_CONTEXT)
        pairs = pairs_by_vote([self.sampler(now)], turns)
        whole = ThreeChannelStep(
            rollouts, teacher_topk(now, turns, TOP_K), with_reference(self.base, pairs)
        )
        sent = self.submit(self.training, whole)
        stepped = self.training.optim_step(self.adam)
        losses = [one.result() for one in (sent if isinstance(sent, list) else [sent])]
        stepped.result()
        reward = statistics.mean(trace.reward for trace in traces)
        figures = {"step": number, "reward": reward, "hints": len(turns), "pairs": len(pairs)}
        return figures | {name: value for one in losses for name, value in one.metrics.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--public", action="store_true")
    given = parser.parse_args(words)
    loop = Loop(given.url, given.public, given.rate)
    before = loop.success()
    for number in range(given.steps):
        print(json.dumps(loop.step(number, given.prompts)), flush=True)
    print(json.dumps({"before": before, "after": loop.success()}), flush=True)


if __name__ == "__main__":
    main()
