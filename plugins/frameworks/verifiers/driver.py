"""Plays episodes of a verifiers environment. Runs in the Python environment that has verifiers.

    python -P driver.py: settings, then orders as lines of JSON --> answers as lines of JSON

    {"env": {…}, "client": "eval" | "train", "renderer": PATH | null, "max_concurrent": 32}
        --> {"ready": NAME} | {"unusable": TEXT}
    {"id": ID, "task": INDEX, "base_url": URL, "api_key": KEY}
        --> {"id": ID, "episode": {…}} | {"id": ID, "error": {…}}
    {"id": ID, "cancel": true}
        --> {"id": ID, "error": {"type": "CancelledError", …}}

It knows nothing of composer_mesh. It ends when its input does. What environments print goes to the
error stream. Model requests pass through `forwarder`, because verifiers keeps a client for each
base URL that it has ever seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LONGEST_TEXT = 2000
END_S = 10.0
"""Seconds after the end of the input until the process ends, whatever still runs."""


class Tasks:
    """The tasks of a taskset by index; they are loaded as far as they are needed."""

    def __init__(self, taskset: Any) -> None:
        self._coming: Iterator[Any] = iter(taskset)
        self._loaded: list[Any] = []
        self._lock = threading.Lock()

    def at(self, index: int) -> Any:
        with self._lock:
            while len(self._loaded) <= index:
                task = next(self._coming, None)
                if task is None:
                    have = len(self._loaded)
                    raise IndexError(f"the taskset has {have} tasks: lower data.options.tasks")
                self._loaded.append(task)
            return self._loaded[index]


class Driver:
    """Plays the episodes that are ordered, side by side."""

    def __init__(self, settings: dict[str, Any], answers: int) -> None:
        from forwarder import Forwarder
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._settings, self._answers = settings, answers
        self.env = load_environment(resolve_env_config(settings["env"]))
        self._tasks = Tasks(self.env.taskset)
        self._forwarder = Forwarder()
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(settings["max_concurrent"])

    async def run(self, orders: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Play until the orders end."""
        async with self._forwarder, self.env.serving():
            self.say({"ready": self.env.config.env_id})
            while (order := await orders.get()) is not None:
                self._obey(order)
            for task in self._playing.values():
                task.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def say(self, answer: dict[str, Any]) -> None:
        line = json.dumps(answer).encode() + b"\n"
        while line:
            line = line[os.write(self._answers, line) :]

    def _obey(self, order: dict[str, Any]) -> None:
        name = order["id"]
        if order.get("cancel"):
            if name in self._playing:
                self._playing[name].cancel()
            return
        self._playing[name] = asyncio.create_task(self._answer(name, order))
        self._playing[name].add_done_callback(lambda _: self._playing.pop(name))

    async def _answer(self, name: str, order: dict[str, Any]) -> None:
        try:
            async with self._free:
                self.say({"id": name, "episode": await self._play(order)})
        except asyncio.CancelledError as error:  # by order, or by what the environment runs
            self.say({"id": name, "error": _named(error)})
            raise
        except Exception as error:  # noqa: BLE001  boundary: reported to whoever ordered it
            self.say({"id": name, "error": _named(error)})

    async def _play(self, order: dict[str, Any]) -> dict[str, Any]:
        task = await asyncio.to_thread(self._tasks.at, order["task"])
        (slot,) = self.env.slots(task)
        sessions: list[str] = []

        def append_trace(trace: Any) -> None:
            sessions.append(trace.id)
            self._forwarder.open(trace.id, order["base_url"], order["api_key"])

        try:
            episode = await self.env.run_slot(slot, self._context(), on_trace=append_trace)
        finally:
            for session in sessions:
                self._forwarder.close(session)
        return _described(episode, self.env.complete(episode))

    def _context(self) -> Any:
        from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig

        url, variable = self._forwarder.base_url, self._forwarder.KEY_VARIABLE
        client: Any = EvalClientConfig(base_url=url, api_key_var=variable)
        if self._settings["client"] == "train":
            client = TrainClientConfig(
                base_url=url, api_key_var=variable, renderer_model_name=self._settings["renderer"]
            )
        return ModelContext(model="policy", client=client)


def _described(episode: Any, complete: bool) -> dict[str, Any]:
    """Return what counts of a finished episode."""
    failed = [one for one in episode.traces if not one.ok]
    errors = [one.last_error for one in (episode, *failed) if one.last_error is not None]
    return {
        "complete": bool(complete),
        "errors": [_described_error(error) for error in errors],
        "traces": [_described_trace(one) for one in episode.traces],
    }


def _described_trace(trace: Any) -> dict[str, Any]:
    rewards = trace.rewards.items()
    return {
        "session": trace.id,
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "reward": trace.reward,
        "rewards": {name: None if one is None else one.score for name, one in rewards},
        "metrics": dict(trace.metrics),
        "stop": trace.stop_condition,
    }


def _described_error(error: Any) -> dict[str, Any]:
    text = error.message[-LONGEST_TEXT:]
    return {"type": error.type, "message": text, "status_code": error.status_code}


def _named(error: BaseException) -> dict[str, Any]:
    text = str(error)[-LONGEST_TEXT:]
    status = getattr(error, "status_code", None)
    return {"type": type(error).__name__, "message": text, "status_code": status}


def read_orders(
    loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[dict[str, Any] | None]
) -> None:
    """Pass on the orders of the input, on a thread; end the process after them."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(orders.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(orders.put_nowait, None)
    ending = threading.Timer(END_S, os._exit, [1])
    ending.daemon = True
    ending.start()


async def play(settings: dict[str, Any], answers: int) -> None:
    orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    try:
        driver = Driver(settings, answers)
    except Exception as error:  # noqa: BLE001  boundary: reported to whoever started it
        text = f"{type(error).__name__}: {error}"[-LONGEST_TEXT:]
        os.write(answers, json.dumps({"unusable": text}).encode() + b"\n")
        return
    reading = (asyncio.get_running_loop(), orders)
    threading.Thread(target=read_orders, args=reading, daemon=True).start()
    await driver.run(orders)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.path[:0] = [str(HERE), str(HERE / "plugins")]
    asyncio.run(play(json.loads(sys.stdin.readline()), answers))


if __name__ == "__main__":
    main()
