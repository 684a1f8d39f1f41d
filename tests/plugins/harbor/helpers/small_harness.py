"""A harness of forty lines that speaks the Messages API; it runs in a box, with no package.

It notes in reached.txt what else than its endpoint it reached: ports of the machine, its folder.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def reached(port: int) -> list[str]:
    found = []
    for host in ("127.0.0.1", "192.0.2.1"):
        try:
            socket.create_connection((host, port), 2).close()
            found.append(f"{host}:{port}")
        except OSError:
            pass
    try:
        Path(__file__).with_name("written").touch()
        found.append("folder")
    except OSError:
        pass
    return found


def answered(messages: list) -> dict:
    body = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [TOOL]}
    request = urllib.request.Request(
        f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages",
        json.dumps(body).encode(),
        {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as said:
        return json.load(said)


def main(port: int, rounds: int, status: int) -> None:
    Path("reached.txt").write_text(" ".join(reached(port)) or "nothing")
    messages = [{"role": "user", "content": sys.stdin.read()}]
    for _ in range(rounds):
        said = answered(messages)
        calls = [one for one in said["content"] if one["type"] == "tool_use"]
        results = []
        for call in calls:
            done = subprocess.run(
                call["input"]["command"], shell=True, capture_output=True, text=True
            )
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": done.stdout}
            results.append(result)
        messages += [{"role": "assistant", "content": said["content"]}]
        if not calls:
            break
        messages += [{"role": "user", "content": results}]
    sys.exit(status)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
