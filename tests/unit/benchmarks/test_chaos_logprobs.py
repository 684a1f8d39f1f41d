"""Asking a version about the tokens that claim it: it knows its own, and denies those of others."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import Trace, Turn

chaos: Any = importlib.import_module("chaos_logprobs")

TEMPERATURE = 0.7
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, build_model: Any) -> dict[int, list[Path]]:
    """Two versions of a policy, saved."""
    root = tmp_path_factory.mktemp("versions")
    for version in (0, 1):
        build_model(version).save_pretrained(root / f"step-{version}.1")
    return {version: [root / f"step-{version}.1"] for version in (0, 1)}


def sampled(model: Any, version: int) -> list[Trace]:
    """Two turns from an engine that serves a model as a version."""
    traces = []
    for sample, prompt in enumerate(PROMPTS):
        turns, ids = [], prompt
        for turn, context in enumerate((prompt, [20, 21])):
            ids = prompt if turn == 0 else [*ids, *context]
            result = generated(model, version, ids, seed=10 * sample + turn)
            turns.append(
                Turn(context, result.token_ids, result.logprobs, result.versions, "length")
            )
            ids = [*ids, *result.token_ids]
        name = f"train-000000-{sample:03d}"
        traces.append(Trace(name, 0, sample, "toolbox", "train", 0, turns, [], 0.0, False, []))
    return traces


def generated(model: Any, version: int, ids: list[int], seed: int) -> GenerationResult:
    engine, found = EmbeddedEngine(model, 2, 64, version), []
    engine.submit(GenerationRequest("r", ids, 6, TEMPERATURE, seed, []), found.append)
    while engine.busy:
        engine.step()
    result: GenerationResult = found[0]
    return result


def claiming(trace: Trace, version: int) -> Trace:
    """The same trace with another version written on its first turn."""
    first = trace.turns[0]
    relabelled = replace(first, versions=[version] * len(first.versions))
    return replace(trace, turns=[relabelled, *trace.turns[1:]])


def test_a_version_knows_its_own_tokens(folders: Any, build_model: Any) -> None:
    traces = [*sampled(build_model(0), 0), *sampled(build_model(1), 1)]
    found = chaos.check_versions(traces, folders, TEMPERATURE)
    assert (found.tokens, found.stale, found.versions) == (48, 0, 2)
    assert found.worst_nats < chaos.TOLERANCE / 5
    assert found.power > 0.9


def test_a_version_denies_tokens_of_another_one(folders: Any, build_model: Any) -> None:
    traces = [claiming(trace, 1) for trace in sampled(build_model(0), 0)]
    found = chaos.check_versions(traces, folders, TEMPERATURE)
    assert found.stale == pytest.approx(12, abs=1)


def test_a_version_that_was_written_twice_may_be_either(folders: Any, build_model: Any) -> None:
    twice = {0: [*folders[1], *folders[0]]}
    assert chaos.check_versions(sampled(build_model(0), 0), twice, TEMPERATURE).stale == 0


def test_tokens_of_versions_without_weights_are_not_judged(folders: Any, build_model: Any) -> None:
    traces = [claiming(trace, 7) for trace in sampled(build_model(0), 0)]
    found = chaos.check_versions(traces, {0: folders[0]}, TEMPERATURE)
    assert (found.tokens, found.stale) == (12, 0)


def test_kept_weights_are_found_by_their_version(tmp_path: Path) -> None:
    for name in ("step-5.11", "step-5.12", "step-10.13", ".step-15.14"):
        (tmp_path / name).mkdir()
    initial = Path("initial")
    assert chaos.policies(tmp_path, initial) == {
        0: [initial],
        5: [tmp_path / "step-5.11", tmp_path / "step-5.12"],
        10: [tmp_path / "step-10.13"],
    }
