"""Captured decode steps: recorded once, replayed on other values, and still what a forward says.

On a CPU a recording by `make_fx` stands for a CUDA graph: it replays operations on the same static
tensors without Python, so that whatever a step would take from the host stays as it was recorded.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_requests import CLOSE, Plain, ask, assert_faithful, put, replay_outcome, serve
from torch.fx.experimental.proxy_tensor import make_fx

from composer_mesh.actors.engines.embedded import STEPS_BETWEEN_PROMPTS, EmbeddedEngine
from composer_mesh.actors.engines.embedded_decode import CudaGraphs, Step, StepNotCaptured
from composer_mesh.actors.engines.embedded_requests import PromptLimits
from composer_mesh.rollouts.generation import GenerationRequest, Truncation


class Recorder:
    """Records steps, after a proof that no value decides which operations they consist of."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, step: Step) -> Step:
        self.recorded += 1
        if self.recorded == 1:  # fake tensors have no values
            make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)()
        recording: Step = make_fx(step)()
        return recording


def eagerly(step: Step) -> Step:
    return step


def mixed(rng: random.Random, count: int) -> list[GenerationRequest]:
    """Requests of several lengths and temperatures, all truncated: one kind of sampling."""
    return [
        GenerationRequest(
            f"r{number}",
            [rng.randrange(300) for _ in range(rng.randint(1, 30))],
            rng.randint(3, 30),
            rng.choice([0.5, 0.7]),
            number,
            [],
            truncation=rng.choice([Truncation(0.8), Truncation(0.9, 20, 0.01)]),
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


def test_recorded_steps_give_the_bits_of_the_same_steps_run_eagerly(
    model: Any, rng: random.Random
) -> None:
    requests, recorder = mixed(rng, 16), Recorder()
    results = serve(EmbeddedEngine(model, 4, 64, capture=recorder), requests)
    assert results == serve(EmbeddedEngine(model, 4, 64, capture=eagerly), requests)
    plain = serve(EmbeddedEngine(model, 4, 64), requests)
    for name, result in results.items():
        assert result.token_ids == plain[name].token_ids
        assert result.logprobs == pytest.approx(plain[name].logprobs, abs=1e-5)
    assert recorder.recorded <= 4  # at the start, and for 1, 2 and 4 rows


def test_weights_changed_in_place_keep_recorded_steps_and_reallocated_ones_drop_them(
    build_model: Any,
) -> None:
    served, recorder = build_model(1), Recorder()
    engine = EmbeddedEngine(served, 1, 64, capture=recorder)
    requests = [ask("r", [1, 2, 3], new=8)]
    serve(engine, requests)
    before = recorder.recorded
    for version, moves in ((2, False), (3, True)):
        newer = build_model(version)
        if moves:
            served.lm_head.weight.data = served.lm_head.weight.data.clone()
        engine.swap(Plain(version, newer.state_dict()))
        result = serve(engine, requests)["r"]
        assert result.versions == [version] * 8
        assert_faithful(newer, requests[0], result)
        assert (recorder.recorded > before) == moves


def test_a_sleeping_engine_keeps_no_recorded_steps_and_records_them_again(
    build_model: Any,
) -> None:
    recorder = Recorder()
    engine = EmbeddedEngine(build_model(1), 1, 64, capture=recorder)
    requests = [ask("r", [1, 2, 3], new=8)]
    first, recorded = serve(engine, requests), recorder.recorded
    engine.sleep(())
    engine.wake(None)
    assert serve(engine, requests) == first
    assert recorder.recorded > recorded


def test_a_long_prompt_keeps_its_row_while_others_decode_in_a_larger_bucket(
    model: Any, rng: random.Random
) -> None:
    limits = PromptLimits(32, 8, step_tokens=2)
    engine = EmbeddedEngine(model, 4, 256, prompt_limits=limits, capture=eagerly)
    results: dict[str, Any] = {}
    requests = [ask(f"r{n}", [rng.randrange(300) for _ in range(5)], 60) for n in range(3)]
    put(engine, requests, results)
    engine.step()
    requests.append(ask("long", [rng.randrange(300) for _ in range(90)], 8))
    put(engine, requests[3:], results)
    while engine.busy:
        engine.step()
    for one in requests:
        assert_faithful(model, one, results[one.request_id])


def test_prompts_join_together_after_some_recorded_steps(model: Any) -> None:
    engine, results = EmbeddedEngine(model, 8, 64, capture=eagerly), {}
    put(engine, [ask(f"first{n}", [1, n], 30) for n in range(3)], results)
    sampled = [engine.step()]
    for late in range(2):
        put(engine, [ask(f"late{late}", [3, late], 30)], results)
        sampled.append(engine.step())
    while engine.decoding == 3:
        sampled.append(engine.step())
    assert sampled == [3] * (1 + STEPS_BETWEEN_PROMPTS) + [5]


def test_a_step_that_needs_a_value_on_the_host_is_refused_at_the_start(build_model: Any) -> None:
    served = build_model(1)

    def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output if float(output.sum()) else output + 1

    served.model.norm.register_forward_hook(hook)
    with pytest.raises(StepNotCaptured, match=r"(?s)cannot be captured.*cuda_graphs = false"):
        EmbeddedEngine(served, 2, 64, capture=Recorder())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_cuda_graphs_give_the_bits_of_the_same_steps_run_eagerly(
    build_model: Any, rng: random.Random
) -> None:
    served, newer = build_model(1).cuda(), build_model(2).cuda()
    requests = mixed(rng, 24)
    graphs = EmbeddedEngine(served, 6, 64, capture=CudaGraphs())
    assert serve(graphs, requests) == serve(
        EmbeddedEngine(served, 6, 64, capture=eagerly), requests
    )
    graphs.swap(Plain(1, newer.state_dict()))
    result = serve(graphs, [ask("r", [1, 2, 3])])["r"]
    expected = replay_outcome(newer, [1, 2, 3], result.token_ids)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, **CLOSE)
