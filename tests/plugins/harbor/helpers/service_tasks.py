"""A task whose words are those of an MCP server in a service, built from a folder of its own."""

from __future__ import annotations

from pathlib import Path

import http_mcp_server

COMPOSE = """
services:
  main:
    depends_on:
      mcp-server:
        condition: service_healthy
  mcp-server:
    build:
      context: ./mcp-server
      args: {PORT: "8000"}
    environment:
      - WORDS=lantern harbor
      - ANSWERS=%s
    expose: ["8000"]
    healthcheck:
      test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000))"]
      interval: 100ms
      retries: 600
"""
DOCKERFILE = """FROM rootfs:{}
ARG PORT
COPY server.py /srv/server.py
RUN echo "port $PORT" > /srv/port.txt
WORKDIR /srv
CMD ["python3", "server.py"]
"""
TOML = """[environment]
workdir = "/app"
docker_image = "rootfs:{root}"
[[environment.mcp_servers]]
name = "words"
transport = "{transport}"
url = "http://mcp-server:8000/{path}"
"""
TESTS = """#!/bin/sh
[ "$(cat /app/words.txt)" = "lantern harbor" ] && reward=1
echo ${reward:-0} > /logs/verifier/reward.txt
"""


def service_task(root: Path, transport: str = "http", answers: str = "json") -> dict[str, str]:
    """Return the files of such a task, whose images have the files of a folder."""
    path = "sse" if transport == "sse" else "mcp"
    return {
        "task.toml": TOML.format(root=root, transport=transport, path=path),
        "tests/test.sh": TESTS,
        "environment/docker-compose.yaml": COMPOSE % answers,
        "environment/mcp-server/Dockerfile": DOCKERFILE.format(root),
        "environment/mcp-server/server.py": Path(http_mcp_server.__file__).read_text(),
    }
