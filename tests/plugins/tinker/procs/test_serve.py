"""`composer-mesh serve` as a command: trainer, sampler and server are killed, and no update is."""

import json
import re
import signal
from pathlib import Path

import httpx
from serve_audit import audit
from served_command import CONFIG, Server, answered, write_policy
from served_world import Client

from composer_mesh.configs.load import load_config


async def test_killed_processes_lose_no_update_and_double_none(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    write_policy(tmp_path / "policy")
    server = Server(tmp_path)
    url = server.start()
    model, session, answers = "", "", []
    try:
        for step in range(8):
            async with httpx.AsyncClient(
                base_url=url, headers={"X-API-Key": "tml-a"}, timeout=60
            ) as http:
                client = Client(http)
                client.session = session
                model = await client.model(base="quickstart")
                session = client.session
                asked = await client.train(model, 2 * step + 1, seed=step)
                if step in (2, 5):
                    server.kill("trainer")
                if step == 6:
                    server.kill("sampler")
                stepped = await client.step(model, 2 * step + 2)
                if step == 4:
                    server.end(signal.SIGKILL)
                    url = server.start()
                    continue
                answers.append(await answered(client, asked))
                await answered(client, stepped)
        async with httpx.AsyncClient(
            base_url=url, headers={"X-API-Key": "tml-a"}, timeout=60
        ) as http:
            client = Client(http)
            sample = {"base_model": "quickstart", "prompt": {"chunks": [{"tokens": [3, 4]}]}}
            asked = await client.post("asample", **sample, sampling_params={"max_tokens": 3})
            await answered(client, asked)
            asked = await client.post("save_weights", model_id=model, seq_id=17)
            saved = json.loads(await answered(client, asked))
    finally:
        ended = server.end(signal.SIGTERM)
    assert ended == 0
    assert len(re.findall(r"^actor_died trainer", server.told(), re.MULTILINE)) == 2
    assert len(re.findall(r"^actor_died sampler", server.told(), re.MULTILINE)) == 1
    assert len({*answers}) == 7
    kinds = audit(server.output, config, tmp_path / "policy", {model: saved["path"]})
    assert kinds[model] == ["forward_backward", "optim_step"] * 8
