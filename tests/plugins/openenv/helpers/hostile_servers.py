"""How tests let a server misbehave, and make a task of it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from openenv_server import Hook, Json, OpenEnvServer, Socket

from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.tasks.task import TaskSettings

CALL_S = 30.0
Send = Callable[[Socket], None]


def hook(send: Send) -> Hook:
    async def answer(socket: Socket, _data: Json) -> None:
        send(socket)
        with suppress(ConnectionError):
            await socket.writer.drain()

    return answer


def made(server: OpenEnvServer, **options: Any) -> OpenEnvTask:
    return OpenEnvTask.create(TaskSettings(call_s=CALL_S), url=server.url, **options)
