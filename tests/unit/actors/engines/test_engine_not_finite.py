"""Rows whose logits are not finite: they fail alone, by name, and leave nothing behind.

Drawing tokens: where a draw falls is the token, and the log-prob is that token's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import Plain, ask, assert_faithful, serve
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.embedded_requests import (
    RunningRequest,
    SamplingRows,
    on_host,
    sampled,
    truncated,
)
from composer_mesh.actors.engines.port import LogitsNotFinite
from composer_mesh.rollouts.generation import WHOLE, GenerationRequest, Truncation

POISON = 257


PROMPTS = {f"r{n}": [n, n + 1, n + 2, 7, 8, 9, 10, 11, 12, 13][: 4 + n] for n in range(5)}


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


def rows_of(
    temperatures: list[float], draws: list[float], truncations: list[Truncation]
) -> SamplingRows:
    columns = zip(temperatures, draws, truncations, strict=True)
    running = [
        RunningRequest(
            GenerationRequest("r", [1], 1, heat, 0, [], truncation=cut),
            lambda _: None,
            None,
            [draw],
            np.ones(1, dtype=np.int64),
        )
        for heat, draw, cut in columns
    ]
    return SamplingRows.of(running, torch.device("cpu"))


def sample(
    logits: torch.Tensor,
    temperatures: list[float],
    draws: list[float],
    truncations: list[Truncation] | None = None,
) -> tuple[list[int], list[float]]:
    cuts = truncations or [WHOLE] * len(draws)
    return on_host(sampled(logits, rows_of(temperatures, draws, cuts)))


@contextmanager
def poisoned_token(model: Any) -> Iterator[None]:
    """Let one token's embedding be NaN, as overflow in some rows only would."""

    def poison(_module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((inputs[0] == POISON)[..., None], torch.nan)

    hook = model.get_input_embeddings().register_forward_hook(poison)
    try:
        yield
    finally:
        hook.remove()


def outcomes(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in requests:
        engine.submit(one, lambda result, name=one.request_id: found.__setitem__(name, result))
    while engine.busy:
        engine.step()
    return found


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("cut", [Truncation(), Truncation(top_p=0.5, top_k=3, min_p=0.1)])
def test_a_row_that_is_not_finite_is_marked_and_changes_no_other(
    broken: float, temperature: float, cut: Truncation
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = sample(logits, [temperature] * 3, [0.1, 0.5, 0.9], [cut] * 3)
    logits[1, 7] = broken
    tokens, logprobs = sample(logits, [temperature] * 3, [0.1, 0.5, 0.9], [cut] * 3)
    assert logprobs[1] != logprobs[1]
    assert 0 <= tokens[1] < 50
    assert ([tokens[0], tokens[2]], [logprobs[0], logprobs[2]]) == (
        [expected[0][0], expected[0][2]],
        [expected[1][0], expected[1][2]],
    )


def test_a_broken_row_of_a_batch_fails_by_name_and_the_others_get_their_tokens(model: Any) -> None:
    others = [ask(name, prompt, 6) for name, prompt in PROMPTS.items()]
    alone = serve(EmbeddedEngine(model, 8, 64, 3), others)
    with poisoned_token(model):
        engine = EmbeddedEngine(model, 8, 64, 3)
        found = outcomes(engine, [others[0], ask("bad", [5, POISON, 6], 6), *others[1:]])
    failure = found.pop("bad")
    assert isinstance(failure, LogitsNotFinite)
    assert "logits are not finite at version 3, in bad" in str(failure)
    assert not any(POISON in one.token_ids for one in alone.values())
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in alone.items()
    }
    assert engine.outstanding == 0


def test_a_broken_row_leaves_nothing_for_those_that_take_its_place(model: Any) -> None:
    """Rows of several lengths read masked positions, where NaN would pass through the mask."""
    with poisoned_token(model):
        engine = EmbeddedEngine(model, 3, 64, prefix_tokens=0)
        long = [20 + n for n in range(30)]
        found = outcomes(engine, [ask(f"bad{n}", [*long, POISON], 4) for n in range(3)])
        assert all(isinstance(one, LogitsNotFinite) for one in found.values())
        later = [ask("long", [*long, 9, 9, 9], 8), ask("short", [5], 8), ask("short2", [6, 7], 8)]
        answered = outcomes(engine, later)
    for one in later:
        assert_faithful(model, one, answered[one.request_id])


def test_broken_weights_fail_what_runs_with_their_version_and_the_next_ones_serve(
    build_model: Any,
) -> None:
    model = build_model(1)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    broken = {name: torch.full_like(one, torch.nan) for name, one in state.items()}
    engine = EmbeddedEngine(model, 4, 64)
    found: dict[str, Any] = {}
    for name, prompt in PROMPTS.items():
        engine.submit(ask(name, prompt, 8), lambda one, name=name: found.__setitem__(name, one))
    engine.step()
    engine.swap(Plain(7, broken))
    while engine.busy:
        engine.step()
    assert set(found) == set(PROMPTS)
    for one in found.values():
        assert "logits are not finite at version 7" in str(one)
    engine.swap(Plain(8, state))
    again = [ask(name, prompt, 8) for name, prompt in PROMPTS.items()]
    answered = outcomes(engine, again)
    for one in again:
        assert_faithful(model, one, answered[one.request_id])


ALMOST_ONE = 1 - 2**-53


def logits_of(*shares: float) -> torch.Tensor:
    return torch.tensor([shares]).log()


def test_a_draw_picks_the_token_on_whose_share_it_falls() -> None:
    logits = logits_of(0.25, 0.5, 0.25)
    picked = [sample(logits, [1.0], [draw])[0][0] for draw in (0, 0.24, 0.26, 0.74, 0.76)]
    assert picked == [0, 0, 1, 1, 2]


def test_no_draw_picks_a_token_of_no_probability() -> None:
    logits = logits_of(0.0, 0.5, 0.0, 0.5, 0.0)
    for draw, token in ((0.0, 1), (0.5, 3), (ALMOST_ONE, 3)):
        tokens, logprobs = sample(logits, [1.0], [draw])
        assert tokens == [token]
        assert logprobs[0] == torch.tensor(0.5).log()


def test_the_last_draw_picks_a_token_whatever_the_sum_rounds_to() -> None:
    """The sum of many float32 shares may be below or above 1."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(1, 997, generator=generator) * 3
        tokens, logprobs = sample(logits, [1.0], [ALMOST_ONE])
        assert tokens[0] >= 990
        assert logprobs[0] > -40


def test_a_row_does_not_depend_on_the_rows_and_temperatures_beside_it() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator)
    temperatures, draws = [1.0, 0.0, 0.3, 1.0, 2.0, 0.0], [0.1, 0.9, 0.5, 0.7, 0.2, 0.4]
    together = sample(logits, temperatures, draws)
    for row in range(6):
        alone = sample(logits[row : row + 1], temperatures[row : row + 1], draws[row : row + 1])
        assert alone == ([together[0][row]], [together[1][row]])


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = logits_of(0.2, 0.5, 0.3)
    tokens, logprobs = sample(logits, [0.0], [0.99])
    assert tokens == [1]
    torch.testing.assert_close(logprobs[0], float(torch.tensor(0.5).log()))


def test_log_probs_are_those_of_the_temperature_sampled_at() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    tokens, logprobs = sample(logits, [0.5], [0.999])
    expected = torch.log_softmax(logits / 0.5, -1)[0, tokens[0]]
    torch.testing.assert_close(logprobs[0], float(expected))


def test_a_truncated_sample_is_one_of_the_kept_tokens_and_has_their_log_prob() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]).log()
    kept = {
        Truncation(): 5,
        Truncation(top_k=2): 2,
        Truncation(top_k=9): 5,
        Truncation(top_p=0.8): 3,
        Truncation(top_p=0.01): 1,
        Truncation(min_p=0.2): 3,
        Truncation(top_p=0.7, top_k=2): 2,
        Truncation(top_p=0.5, min_p=0.2): 1,
    }
    for truncation, count in kept.items():
        probs = logits.exp()[0, :count] / logits.exp()[0, :count].sum()
        seen = set()
        for draw in torch.linspace(0, ALMOST_ONE, 200).tolist():
            (token,), (logprob,) = sample(logits, [1.0], [draw], [truncation])
            assert logprob == pytest.approx(probs[token].log().item(), abs=1e-6)
            seen.add(token)
        assert seen == set(range(count)), truncation


@pytest.mark.parametrize(
    ("truncation", "warper"),
    [
        (Truncation(top_k=7), TopKLogitsWarper(7)),
        (Truncation(top_p=0.6), TopPLogitsWarper(0.6)),
        (Truncation(min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_what_is_kept_is_what_transformers_keeps(truncation: Truncation, warper: Any) -> None:
    for seed in range(50):
        logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(seed)) * 3
        theirs = warper(torch.zeros(1, 1, dtype=torch.long), logits)[0]
        cuts = rows_of([1.0], [0.5], [truncation]).values[2:, :, None]
        assert torch.equal(truncated(logits, *cuts)[0], theirs)


def test_a_truncated_row_does_not_change_its_neighbours_and_greedy_is_not_truncated() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    cut = Truncation(top_k=3, top_p=0.9)
    alone = sample(logits, [1.0, 1.0, 0.0], [0.3, 0.6, 0.9])
    beside = sample(logits, [1.0, 1.0, 0.0], [0.3, 0.6, 0.9], [WHOLE, cut, cut])
    assert [one[0] for one in alone] == [one[0] for one in beside]
    assert [one[2] for one in alone] == [one[2] for one in beside]
