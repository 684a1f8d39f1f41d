"""`composer-mesh serve` with two trainer ranks: each is killed at work, and no update is lost."""

import json
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import served_ranks
from live_run import RUN_DEADLINE_S, wait_until
from rank_processes import run_ranks
from served_command import CONFIG, Server, answered, write_policy
from served_world import Client

from composer_mesh.configs.load import load_config
from composer_mesh.plugins.tinker.server.operation_log import read_records

pytestmark = pytest.mark.timeout(1200)  # a server of two ranks starts four times
STEPS = 6
KILLED_AT = {1: "trainer-1", 4: "trainer-0"}
RESTARTED_AT = 3
BUSY_S = 0.5
LONG = {"rows": 300, "length": 120}
"""Enough for several seconds of both ranks."""


@contextmanager
def stopped(server: Server, killed: str) -> Iterator[None]:
    """Stop the other rank, without which no operation is finished, however long a test waits."""
    other = server.worker_of(*(name for name in KILLED_AT.values() if name != killed))
    other.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            other.resume()


def kill_at_work(server: Server, name: str, request_id: str) -> None:
    """Kill a rank that is computing an operation, which is not answered then."""
    process = server.worker_of(name)
    before = sum(process.cpu_times()[:2])

    def computes() -> bool:
        return sum(process.cpu_times()[:2]) > before + BUSY_S

    wait_until(computes, f"work of {name}", RUN_DEADLINE_S)
    process.kill()
    with sqlite3.connect(f"file:{server.output / 'operations.sqlite'}?mode=ro", uri=True) as rows:
        query = "SELECT finished FROM operations WHERE request_id = ?"
        assert rows.execute(query, (request_id,)).fetchone() == (None,)


async def step(server: Server, http: httpx.AsyncClient, models: list[str], number: int) -> None:
    """Train all models of one session, the first with a long call during which a rank may die."""
    client, asked = Client(http), list[Any]()
    for place, model in enumerate(models):
        killed = number in KILLED_AT and place == 0
        more = LONG if killed else {"rows": place + 1}
        with stopped(server, KILLED_AT[number]) if killed else nullcontext():
            accepted = await client.train(model, 2 * number + 1, seed=10 * number + place, **more)
            asked.append(accepted)
            if killed:
                kill_at_work(server, KILLED_AT[number], accepted["request_id"])
    asked += [await client.step(model, 2 * number + 2) for model in models]
    for one in asked:
        await answered(client, one)


@pytest.mark.parametrize(
    ("settings", "count"),
    [(("serve.models_in_memory=3",), 4), (("serve.full_weights=true",), 1)],
    ids=["adapters of more models than are in memory", "all weights of one model"],
)
async def test_killed_ranks_lose_no_update_and_double_none(
    tmp_path: Path, settings: tuple[str, ...], count: int
) -> None:
    write_policy(tmp_path / "policy")
    server = Server(tmp_path, "trainer.ranks=2", *settings)
    url, models, saved = server.start(), list[str](), dict[str, str]()

    def connected() -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, headers={"X-API-Key": "tml-a"}, timeout=60)

    try:
        async with connected() as http:
            client = Client(http)
            models += [await client.model(n, base="quickstart") for n in range(count)]
        for number in range(STEPS):
            if number == RESTARTED_AT:
                server.end(signal.SIGKILL)
                url = server.start()
            async with connected() as http:
                await step(server, http, models, number)
        async with connected() as http:
            client = Client(http)
            for model in models:
                asked = await client.post("save_weights", model_id=model, seq_id=2 * STEPS + 1)
                saved[model] = json.loads(await answered(client, asked))["path"]
            asked = await client.post(
                "save_weights_for_sampler", model_id=models[0], seq_id=2 * STEPS + 2, path="snap"
            )
            path = json.loads(await answered(client, asked))["path"]
            prompt = {"chunks": [{"tokens": [3, 4]}]}
            sample = {"model_path": path, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
            await answered(client, await client.post("asample", **sample))
    finally:
        ended = server.end(signal.SIGTERM)
    assert ended == 0
    died = re.findall(r"^actor_died (trainer-[01])", server.told(), re.MULTILINE)
    assert died == ["trainer-1", "trainer-0"]
    assert len(re.findall(r"^actor_restarted trainer-0", server.told(), re.MULTILINE)) == 2
    with sqlite3.connect(server.output / "operations.sqlite") as rows:
        steps = {name: one.steps for name, one in read_records(rows).models.items()}
    assert steps == dict.fromkeys(models, STEPS)
    config = load_config(CONFIG, ["trainer.ranks=2", *settings])
    given = (tmp_path / "rendezvous", server.output, config, tmp_path / "policy", saved)
    run_ranks(served_ranks.audited, given, 2)
