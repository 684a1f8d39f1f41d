"""A small harness that speaks the Messages API and MCP; it runs in a box, with no package.

Its tools are a shell, and those of the servers in the file that a variable names. It notes in
reached.txt what else than its endpoint it reached: ports of the machine, its folder.
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


class Server:
    """A server of MCP, as a process of this harness."""

    def __init__(self, command: str, args: list) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([command, *args], text=True, **pipes)
        self.begin()

    def begin(self) -> None:
        client = {"name": "small", "version": "1"}
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        self.result("initialize", hello)
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message: dict) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def result(self, method: str, params: dict) -> dict:
        self.send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        return json.loads(self.process.stdout.readline())["result"]

    def called(self, tool: str, arguments: dict) -> str:
        said = self.result("tools/call", {"name": tool, "arguments": arguments})
        return said["content"][0]["text"]


class HttpServer(Server):
    """A server of MCP by its URL, which answers in JSON."""

    def __init__(self, url: str, headers: dict) -> None:
        self.url, self.headers = url, {"Content-Type": "application/json", **headers}
        self.begin()

    def send(self, message: dict) -> None:
        request = urllib.request.Request(self.url, json.dumps(message).encode(), self.headers)
        with urllib.request.urlopen(request, timeout=60) as said:
            if session := said.headers.get("Mcp-Session-Id"):
                self.headers["Mcp-Session-Id"] = session
            self.answer = said.read()

    def result(self, method: str, params: dict) -> dict:
        self.send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        return json.loads(self.answer)["result"]


def opened(listed: dict) -> Server:
    """Start or connect to a server."""
    if listed["type"] == "stdio":
        return Server(listed["command"], listed["args"])
    return HttpServer(listed["url"], listed["headers"])


def servers() -> dict:
    """Start the servers of the task by their names."""
    file = os.environ.get("COMPOSER_MESH_MCP_CONFIG")
    listed = json.loads(Path(file).read_text())["mcpServers"] if file else {}
    return {name: opened(one) for name, one in listed.items()}


def offered(started: dict) -> list:
    tools = [TOOL]
    for name, server in started.items():
        for one in server.result("tools/list", {})["tools"]:
            schema = {"input_schema": one["inputSchema"], "description": one["description"]}
            tools.append({"name": f"mcp__{name}__{one['name']}", **schema})
    return tools


def done(call: dict, started: dict) -> str:
    """Return what a call of a tool gave."""
    if call["name"] == "bash":
        command = call["input"]["command"]
        return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
    _, server, tool = call["name"].split("__")
    return started[server].called(tool, call["input"])


def answered(messages: list, tools: list) -> dict:
    body = {"model": "m", "max_tokens": 500, "messages": messages, "tools": tools}
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
    started = servers()
    tools = offered(started)
    for _ in range(rounds):
        said = answered(messages, tools)
        calls = [one for one in said["content"] if one["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": done(one, started)}
            for one in calls
        ]
        messages += [{"role": "assistant", "content": said["content"]}]
        if not calls:
            break
        messages += [{"role": "user", "content": results}]
    sys.exit(status)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
