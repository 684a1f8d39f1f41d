"""`composer-mesh serve` as a command: trainer, sampler and server are killed, and no update is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import psutil
from commands import Process, forked
from live_run import RUN_DEADLINE_S, wait_until
from serve_audit import audit
from served_world import Client

from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


class Server:
    """A server on one folder, which is started again after each end."""

    def __init__(self, place: Path) -> None:
        self._place, self.output = place, place / "served"
        self.settings = [
            f"policy.path={place / 'policy'}",
            "serve.keep_operations=true",
            "serve.save_every=2",
            "supervision.backoff_s=0.01",
        ]
        self._starts = 0

    def start(self) -> str:
        self._starts += 1
        settings = [word for one in self.settings for word in ("--set", one)]
        words = ("serve", str(CONFIG), "--output", str(self.output), "--port", "0", *settings)
        with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
            self.process: Process = forked(words, out, err, self._place)
        wait_until(lambda: self._address() != "", "a server", RUN_DEADLINE_S)
        return self._address()

    def _file(self, name: str) -> Path:
        return self._place / f"{name}-{self._starts}"

    def _address(self) -> str:
        found = re.search(r"serving quickstart at (\S+),", self._file("out").read_text())
        return "" if found is None else found.group(1)

    def told(self) -> str:
        """Return what all servers have printed."""
        return "".join(one.read_text() for one in self._place.glob("out-*"))

    def kill(self, name: str) -> None:
        """Kill the process of an actor."""
        for one in psutil.Process(self.process.pid).children(recursive=True):
            if name in " ".join(one.cmdline()):
                one.kill()
                return
        raise AssertionError(f"no process of {name}")

    def end(self, how: signal.Signals) -> int:
        os.kill(self.process.pid, how)
        return self.process.wait(RUN_DEADLINE_S)


async def test_killed_processes_lose_no_update_and_double_none(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    policy.save_policy(
        policy.build_model(config.policy, tokenizer, 1), tokenizer, tmp_path / "policy"
    )
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
                answers.append((await client.raw(asked)).content)
                assert "error" not in await client.result(stepped)
        async with httpx.AsyncClient(
            base_url=url, headers={"X-API-Key": "tml-a"}, timeout=60
        ) as http:
            client = Client(http)
            sample = {"base_model": "quickstart", "prompt": {"chunks": [{"tokens": [3, 4]}]}}
            asked = await client.post("asample", **sample, sampling_params={"max_tokens": 3})
            assert b"error" not in (await client.raw(asked)).content
            saved = await client.result(
                await client.post("save_weights", model_id=model, seq_id=17)
            )
    finally:
        ended = server.end(signal.SIGTERM)
    assert ended == 0
    assert len(re.findall(r"^actor_died trainer", server.told(), re.MULTILINE)) == 2
    assert len(re.findall(r"^actor_died sampler", server.told(), re.MULTILINE)) == 1
    assert len({*answers}) == 7
    kinds = audit(server.output, config, tmp_path / "policy", {model: saved["path"]})
    assert kinds[model] == ["forward_backward", "optim_step"] * 8
