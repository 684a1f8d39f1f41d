"""What an open session holds of its connection."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from served_tasks import served_beside
from websockets.sync.client import connect
from wsproto.handshake import H11Handshake


def test_an_open_session_holds_no_parser_of_its_handshake_and_answers_on(
    tmp_path: Path, build_config: Any
) -> None:
    config = build_config(data={"task": "served_tasks:Count"})
    with served_beside(tmp_path, config) as url:
        address = f"ws{url.removeprefix('http')}/ws"
        with connect(address, proxy=None) as first, connect(address, proxy=None) as second:
            for socket in (first, second, first):
                socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
                assert json.loads(socket.recv())["type"] == "observation"
            assert not [one for one in gc.get_objects() if type(one) is H11Handshake]
