"""The embedded engine on an accelerator: the same answers, and what it makes is made there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_requests import Plain, ask, replay_outcome, serve

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.rollouts.generation import GenerationRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def requests_of(rng: random.Random, temperature: float) -> list[GenerationRequest]:
    """Groups of equal prompts behind a header, more than there are rows."""
    header = [rng.randrange(300) for _ in range(16)]
    prompts = [header + [rng.randrange(300) for _ in range(rng.randint(1, 20))] for _ in range(6)]
    return [
        GenerationRequest(f"{group}-{n}", prompts[group], 12, temperature, 7 * group + n, [])
        for group in range(6)
        for n in range(3)
    ]


def test_greedy_tokens_are_those_of_the_cpu(build_model: Any, rng: random.Random) -> None:
    requests = requests_of(rng, temperature=0.0)
    expected = serve(EmbeddedEngine(build_model(1), 7, 64), requests)
    results = serve(EmbeddedEngine(build_model(1).cuda(), 7, 64), requests)
    for name, result in results.items():
        assert result.token_ids == expected[name].token_ids
        assert result.logprobs == pytest.approx(expected[name].logprobs, abs=1e-3)


def test_bfloat16_log_probs_are_those_of_a_full_forward(
    build_model: Any, rng: random.Random
) -> None:
    model = build_model(1).cuda().bfloat16()
    requests = requests_of(rng, temperature=1.0)
    results = serve(EmbeddedEngine(model, 7, 64), requests)
    for asked in requests:
        result = results[asked.request_id]
        expected = replay_outcome(model, asked.prompt_ids, result.token_ids)
        assert (torch.tensor(result.logprobs) - expected).abs().mean() < 0.1


def test_new_weights_serve_the_tokens_that_follow(build_model: Any) -> None:
    served, newer = build_model(1).cuda(), build_model(2).cuda()
    engine = EmbeddedEngine(served, 3, 64)
    done: list[Any] = []
    asked = ask("r", list(range(20)), new=12)
    engine.submit(asked, done.append)
    for _ in range(4):
        engine.step()
    engine.swap(Plain(1, newer.state_dict()))
    while engine.busy:
        engine.step()
    expected = replay_outcome(newer, asked.prompt_ids, done[0].token_ids)[4:]
    assert done[0].versions == [0] * 4 + [1] * 8
    assert done[0].logprobs[4:] == pytest.approx(expected.tolist(), abs=1e-3)
