"""Agents of `harbor_endpoint.py`: a process that plays episodes at endpoints, and times each turn.

Reads a plan from its input, and writes the seconds of all turns. Standard library only, so that it
starts at once and the clients are as light as they can be.
"""

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
SAID = "The command has ended with exit code 0. Its output was: "
TOOLS = ("bash", "read_file", "write_file")
PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}


def opening_of(protocol: str, system: str, stream: bool, tokens: int) -> Json:
    """Return the body of an episode's requests, but for its conversation."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [{"name": name, "description": f"The tool {name}."} for name in TOOLS]
    body: Json = {"model": "policy", "stream": stream}
    if protocol == "messages":
        shaped = [{**tool, "input_schema": schema} for tool in tools]
        return {**body, "system": system, "max_tokens": tokens, "tools": shaped}
    if protocol == "responses":
        shaped = [{**tool, "type": "function", "parameters": schema} for tool in tools]
        return {**body, "instructions": system, "max_output_tokens": tokens, "tools": shaped}
    shaped = [{"type": "function", "function": {**tool, "parameters": schema}} for tool in tools]
    return {**body, "max_tokens": tokens, "tools": shaped}


def body_of(protocol: str, opening: Json, system: str, conversation: list[Json]) -> bytes:
    """Return the request for the next answer of a conversation, all of which it repeats."""
    if protocol == "responses":
        return json.dumps({**opening, "input": conversation}).encode()
    first = [{"role": "system", "content": system}] if protocol == "chat" else []
    return json.dumps({**opening, "messages": [*first, *conversation]}).encode()


def answer_of(protocol: str, stream: bool, content: bytes) -> Json:
    """Return the assistant's message of an answer, as its client sends it back."""
    lines = content.decode().split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if protocol == "responses":
        ended = events[-1]["response"] if stream else json.loads(content)
        return dict(next(one for one in ended["output"] if one["type"] == "message"))
    if protocol == "chat":
        choices = [event["choices"][0]["delta"] for event in events if event["choices"]]
        parts = choices if stream else [json.loads(content)["choices"][0]["message"]]
        return {"role": "assistant", "content": "".join(one.get("content") or "" for one in parts)}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    blocks = deltas if stream else json.loads(content)["content"]
    return {"role": "assistant", "content": "".join(one.get("text", "") for one in blocks)}


def play(plan: Json, together: Barrier, number: int) -> list[float]:
    """Play an episode; return the seconds of its turns. All begin their second turn together."""
    protocol, stream, system = plan["protocol"], plan["stream"], plan["system"]
    url, key = plan["agents"][number]
    where = urlsplit(url)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(str(where.hostname), where.port)
    opening = opening_of(protocol, system, stream, plan["tokens"])
    conversation: list[Json] = [{"role": "user", "content": f"Do task {number}."}]
    seconds = []
    for turn in range(plan["turns"]):
        body = body_of(protocol, opening, system, conversation)
        began = time.perf_counter()
        connection.request("POST", where.path + PATHS[protocol], body, headers)
        reply = connection.getresponse()
        content = reply.read()
        seconds.append(time.perf_counter() - began)
        if reply.status != http.HTTPStatus.OK:
            raise RuntimeError(f"status {reply.status}: {content.decode()[:500]}")
        conversation.append(answer_of(protocol, stream, content))
        conversation.append({"role": "user", "content": f"{SAID}{number} {turn}"})
        if turn == 0:
            together.wait()
    return seconds


def main() -> None:
    plan = json.load(sys.stdin)
    count = len(plan["agents"])
    with ThreadPoolExecutor(count) as pool:
        json.dump(list(pool.map(partial(play, plan, Barrier(count)), range(count))), sys.stdout)


if __name__ == "__main__":
    main()
