"""The clients of verifiers against the agent endpoint: the ids of both sides are the same."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from agent_clients import OpenedAgent, opened_agent
from recorder import recorder

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.plugins.frameworks.verifiers.driver_process import environ
from composer_mesh.rollouts.captured_turns import CapturedTrajectory
from composer_mesh.rollouts.chat import ChatFormat

UNIT = Path(__file__).parents[3] / "unit" / "actors" / "rollout_workers"
RECORDED = json.loads((UNIT / "verifiers_requests.json").read_text())
ENVIRONMENTS = Path(__file__).with_name("environments")
PLAY_ONCE = Path(__file__).with_name("play_once.py")
PLUGINS = "composer_mesh/plugins/frameworks/verifiers/plugins"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = build_tokenizer(["1 plus 2? again it is 3 4 5"] * 40, 320)
    found.save_pretrained(tmp_path_factory.mktemp("tokenizer") / "policy")
    return found


@pytest.fixture
def renderer(tokenizer: Any, tmp_path: Path) -> str:
    tokenizer.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture
async def agent(tokenizer: Any) -> AsyncIterator[OpenedAgent]:
    async with opened_agent(ChatFormat(tokenizer, []), "it is 2", "2") as agent:
        yield agent


async def played(
    python: Path, agent: OpenedAgent, harness: str, **client: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What verifiers tells of one episode, and the requests that it sent."""
    env = {
        "taskset": {"id": "small_sums"},
        "agent": {"harness": {"id": harness}, "runtime": {"type": "subprocess"}},
    }
    url = urlsplit(agent.episode.base_url)
    plugins = Path(__file__).parents[4] / "src" / PLUGINS
    paths = os.pathsep.join([str(ENVIRONMENTS), str(plugins)])
    with recorder(f"http://{url.netloc}") as recording:
        client["base_url"] = recording.own + url.path
        program = await asyncio.create_subprocess_exec(
            *(str(python), str(PLAY_ONCE), json.dumps(env), json.dumps(client)),
            env={
                **environ(python),
                IMPORT_PATHS: paths,
                "PYTHONPATH": paths,
                "API_KEY": agent.episode.api_key,
            },
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await program.communicate()
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert told["errors"] == []
    return told, recording.requests


def flat(one: CapturedTrajectory) -> dict[str, list[Any]]:
    """A trajectory as a branch of verifiers: ids, which of them were sampled, and log-probs."""
    ids, sampled, logprobs = list[int](), list[bool](), list[float]()
    for turn in one.turns:
        ids += [*turn.context_ids, *turn.action_ids]
        sampled += [False] * len(turn.context_ids) + [True] * len(turn.action_ids)
        logprobs += [0.0] * len(turn.context_ids) + turn.logprobs
    return {"ids": ids, "sampled": sampled, "logprobs": logprobs}


async def test_the_train_client_has_exactly_the_ids_that_are_trained(
    verifiers_python: Path, agent: OpenedAgent, renderer: str
) -> None:
    told, requests = await played(
        verifiers_python, agent, "two_turns", type="train", renderer_model_name=renderer
    )
    assert len(requests) == len(agent.generation.requests) == 2
    captured = agent.episode.trajectories(told["session"])
    assert [flat(one) for one in captured] == told["branches"]
    assert [len(one.turns) for one in captured] == [2]
    assert compared(requests[0]) == compared(RECORDED["train"])


@pytest.mark.parametrize(
    ("harness", "name"), [("in_process_chat", "eval"), ("null", "eval, streamed")]
)
async def test_the_eval_client_is_captured(
    verifiers_python: Path, agent: OpenedAgent, harness: str, name: str
) -> None:
    told, requests = await played(verifiers_python, agent, harness, type="eval")
    assert told["reward"] == 2.5
    (captured,) = agent.episode.trajectories(told["session"])
    (result,) = agent.generation.results
    assert captured.turns[0].action_ids == result.token_ids
    assert compared(requests[0]) == compared(RECORDED[name])


def compared(request: dict[str, Any]) -> dict[str, Any]:
    """A request without what differs between tokenizers and episodes."""
    body = {**request["body"]}
    if "token_ids" in body:
        body["token_ids"] = bool(body["token_ids"])
        sampling = body["sampling_params"]
        body["sampling_params"] = {**sampling, "stop_token_ids": bool(sampling["stop_token_ids"])}
    path = "/" + request["path"].removeprefix("/e/").partition("/")[2]
    return {
        "path": path if "/e/" in request["path"] else request["path"],
        "headers": sorted(request["headers"]),
        "body": body,
    }
