"""Whatever a client sends, an environment server answers each frame by one, and goes on."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from served_tasks import SECRET, ScriptedSocket, call, pool_of

from composer_mesh.plugins.openenv.client.wire import SERVER_FRAME, ErrorCode
from composer_mesh.plugins.openenv.server.app import serve_socket

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 1.5, "", "x" * 5000, "\x00\ud800", [], {}, [[]], {"a": {}}),
    *("reset", "step", "state", "mcp", "call_tool", "list_tools", "finish", "add", "answer"),
)
KEYS = (
    *("type", "data", "message", "tool_name", "arguments", "seed", "index", "split", "turn"),
    *("episode_id", "metadata", "jsonrpc", "id", "method", "params", "by"),
)
GOOD: tuple[Any, ...] = (
    {"type": "reset", "data": {"index": 1}},
    {"type": "step", "data": call("add", by=1)},
    {"type": "step", "data": call("fail")},
    {"type": "step", "data": {"message": "done"}},
    {"type": "state", "data": {"turn": 0}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
)


def broken(rng: random.Random) -> str:
    """A frame: a good one, one with keys or values replaced, or with bytes replaced."""
    frame = json.loads(json.dumps(rng.choice(GOOD)))
    for _ in range(rng.randrange(4)):
        place = frame
        while isinstance(place.get("data"), dict) and rng.random() < 0.7:
            place = place["data"]
        place[rng.choice(KEYS)] = rng.choice(VALUES)
        if not isinstance(frame, dict):
            break
    text = json.dumps(frame)
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", '"', "{", "NaN", "\x00", "é"]) + text[at + 1 :]
    return text


def test_each_frame_has_one_answer_that_tells_no_row(cases: Any, tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1)
    codes = {one.value for one in ErrorCode} - {ErrorCode.SESSION_ERROR.value}

    async def played(seed: Any) -> None:
        rng = random.Random(str(seed))
        frames = [broken(rng) for _ in range(12)]
        frames = [one for one in frames if '"close"' not in one]
        await serve_socket(socket := ScriptedSocket(*frames), pool)
        assert len(socket.answers) == len(frames)
        for answer in socket.answers:
            seen = SERVER_FRAME.validate_python(answer)
            assert seen.type != "error" or seen.data.code in codes
        assert SECRET not in json.dumps(socket.answers)

    for seed in cases(60):
        asyncio.run(played(seed))
