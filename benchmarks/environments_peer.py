"""OpenEnv's server with the echo of `environments.py`, by one of uvicorn's WebSocket libraries.

    python environments_peer.py PORT SESSIONS wsproto|websockets-sansio

It has the settings that hold most sessions: an async environment on a single thread, and neither
compression nor pings.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State


class Said(Action):
    """What is said."""

    message: str


class Heard(Observation):
    """What was said."""

    echoed: str


class Echo(Environment):
    """Says again what was said."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Heard:
        return Heard(echoed="ready")

    async def reset_async(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Heard:
        return Heard(echoed="ready")

    def step(self, action: Said, timeout_s: Any = None, **_: Any) -> Heard:
        return Heard(echoed=action.message)

    async def step_async(self, action: Said, timeout_s: Any = None, **_: Any) -> Heard:
        return Heard(echoed=action.message)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    port, most = int(sys.argv[1]), int(sys.argv[2])
    limits = ConcurrencyConfig(max_concurrent_envs=most, session_timeout=900)
    app = create_app(Echo, Said, Heard, env_name="echo", concurrency_config=limits)
    uvicorn.run(
        app,
        port=port,
        ws=sys.argv[3],
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        backlog=4096,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
