"""What a hostile client of a training server tries, in a process of its own: see serve_hostile.py.

Each attack is within the limits of the protocol, or just beyond one: nothing here knows a key but
its own. What the server answers is not looked at: others must not notice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from composer_mesh.plugins.tinker.server.protobuf_messages import ForwardBackwardRequest

KEY = {"x-api-key": "tml-hostile"}
PAUSE_S = 0.2
"""Seconds between two attacks: the server is attacked, not the core that both share."""
MB = 1_000_000


class Hostile:
    """The attacks of one client; each is a method without arguments."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, headers=KEY, timeout=30)
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._session = self._post("create_session")["session_id"]
        self._count = itertools.count(1)
        self._idle: list[socket.socket] = []

    def attacks(self) -> list[Callable[[], Any]]:
        """Return them all."""
        return [
            self.tiny_temperature,
            self.tiny_temperature_of_openai,
            self.diverged_weights,
            self.operations_behind_a_gap,
            self.large_metadata,
            self.sessions,
            self.samplers,
            self.idle_connections,
            self.unfinished_bodies,
            self.invalid_numbers,
            self.large_valid_body,
            self.many_stop_texts,
            self.degenerate_messages,
        ]

    def tiny_temperature(self) -> None:
        self._sample({"temperature": 1e-40, "max_tokens": 8})
        self._sample({"temperature": 1e-4, "top_p": 1e-40, "max_tokens": 8})

    def tiny_temperature_of_openai(self) -> None:
        body = {"model": "base", "prompt": [5, 6], "max_tokens": 8, "temperature": 1e-40}
        self._http.post("/v1/completions", json=body)

    def diverged_weights(self) -> None:
        model = self._model()
        if model is None:
            return
        for step in range(3):
            self._train(model, 2 * step + 1, 16)
            adam = {"learning_rate": 1e6}
            self._post("optim_step", model_id=model, seq_id=2 * step + 2, adam_params=adam)
        saved = self._answer(self._post("save_weights_for_sampler", model_id=model, seq_id=7))
        if path := saved.get("path"):
            self._sample({"max_tokens": 8}, model_path=path)
        self._post("unload_model", model_id=model)

    def operations_behind_a_gap(self) -> None:
        model = self._model()
        if model is not None:
            for number in range(40):
                self._train(model, 1000 + number, 1_000_000)
            self._post("unload_model", model_id=model)

    def large_metadata(self) -> None:
        self._model({"text": ["x" * 9000] * 3000})

    def sessions(self) -> None:
        for _ in range(100):
            self._post("create_session")

    def samplers(self) -> None:
        for _ in range(100):
            self._post(
                "create_sampling_session",
                session_id=self._session,
                sampling_session_seq_id=next(self._count),
                base_model="base",
            )

    def idle_connections(self) -> None:
        for one in self._idle[:-2000]:
            one.close()
        del self._idle[:-2000]
        for _ in range(100):
            self._idle.append(socket.create_connection(self._address, timeout=5))

    def unfinished_bodies(self) -> None:
        head = f"POST /api/v1/asample HTTP/1.1\r\nhost: {self._address[0]}\r\n"
        head += f"x-api-key: {KEY['x-api-key']}\r\ncontent-length: {30 * MB}\r\n\r\n"
        for _ in range(10):
            one = socket.create_connection(self._address, timeout=5)
            self._idle.append(one)
            one.sendall(head.encode())
            one.sendall(b" " * (20 * MB))

    def invalid_numbers(self) -> None:
        text = b'{"prompt": {"chunks": [{"tokens": [' + b"-1," * (9 * MB // 3) + b"-1]}]}}"
        self._raw("asample", text)

    def large_valid_body(self) -> None:
        tokens = "[" + "5," * (10 * MB) + "5]"
        text = f'{{"prompt": {{"chunks": [{{"tokens": {tokens}}}]}}, "sampling_params": {{}}}}'
        self._raw("asample", text.encode())

    def many_stop_texts(self) -> None:
        self._sample({"max_tokens": 300, "stop": [f"never {n}" for n in range(64)]})

    def degenerate_messages(self) -> None:
        text = "<tool_call>\n<function=f>\n<parameter=a>" + "\n" * 20_000
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        messages.append({"role": "user", "content": "x"})
        body = {"model": "base", "messages": messages, "max_tokens": 4}
        self._http.post("/v1/chat/completions", json=body)

    def _model(self, metadata: dict[str, Any] | None = None) -> str | None:
        made = self._post(
            "create_model",
            session_id=self._session,
            model_seq_id=next(self._count),
            base_model="base",
            lora_config={"rank": 8, "seed": 1},
            user_metadata=metadata,
        )
        return made.get("model_id")

    def _train(self, model: str, seq: int, tokens: int) -> None:
        """Train on sequences of at most 300 tokens, which the server's context holds."""
        message = ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
        row = np.full(min(tokens, 300), 5)
        for _ in range(min(1000, tokens // len(row))):
            one = message.data.add()
            one.model_input.add().encoded_text.tokens = row.astype("<i4").tobytes()
            targets = one.loss_fn_inputs["target_tokens"]
            targets.dense, targets.dtype = row.tobytes(), 2
            targets.shape.append(len(row))
        body, headers = message.SerializeToString(), {"content-type": "application/x-protobuf"}
        self._http.post("/api/v1/forward_backward", content=body, headers=headers)

    def _sample(self, settings: dict[str, Any], **where: str) -> None:
        prompt = {"chunks": [{"tokens": [*range(3, 43)]}]}
        where = where or {"base_model": "base"}
        self._post("asample", prompt=prompt, sampling_params=settings, **where)

    def _answer(self, accepted: dict[str, Any]) -> dict[str, Any]:
        for _ in range(10):
            found = self._post("retrieve_future", request_id=accepted.get("request_id", ""))
            if found.get("type") != "try_again":
                return found
        return {}

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        return self._raw(path, json.dumps(body).encode())

    def _raw(self, path: str, body: bytes) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        answer = self._http.post(f"/api/v1/{path}", content=body, headers=headers)
        try:
            found = answer.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def attack_until(url: str, until: float, result: Any) -> None:
    """Attack until a time of the wall clock; sends how often each attack was made."""
    hostile = Hostile(url)
    attacks = hostile.attacks()
    made = dict.fromkeys((one.__name__ for one in attacks), 0)
    for attack in itertools.cycle(attacks):
        if time.time() > until:
            break
        with contextlib.suppress(httpx.HTTPError, OSError):  # refused is what it should be
            attack()
        made[attack.__name__] += 1
        time.sleep(PAUSE_S)
    result.send(made)
