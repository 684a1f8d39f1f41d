"""Compose files with changed keys, values and bytes: read, or refused by name, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from composer_mesh.plugins.harbor.compose import FILE, MOST_SERVICES, read_compose
from composer_mesh.tasks.errors import UnusableTask

GOOD = """services:
  main:
    depends_on:
      web:
        condition: service_healthy
  web:
    build: {context: web, args: {A: "1"}}
    command: ["serve", "--port", "8000"]
    environment:
      - KEY=${KEY:-none}
    healthcheck:
      test: ["CMD", "check"]
      interval: 2s
      retries: 3
"""
PIECES = (
    *(
        "*a",
        "&a ",
        "!!binary ",
        "? ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ": ",
        "\n",
        "  ",
        "\t",
        "|\n",
        ">-",
    ),
    *(
        "'",
        '"',
        "$",
        "${",
        "}",
        "$$",
        "#",
        "%",
        "---\n",
        "...\n",
        "<<: ",
        "\x00",
        "\u2028",
        "\ufeff",
    ),
    *('"\\x00"', '"\\ud800"', "null", "~", "1e999", "0x", "services:", "main:", "privileged: true"),
    *("volumes: [/:/host]", "image: ../../x", "context: ../..", "network_mode: host", "9" * 5000),
)


def broken(rng: random.Random) -> bytes:
    """Return the file with pieces put in, taken out, moved or repeated."""
    text = GOOD
    for _ in range(rng.randrange(1, 6)):
        at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        piece = rng.choice(PIECES) * rng.choice((1, 1, 1, 50))
        taken = text[at : min(to, at + 30)]
        changed = rng.choice((piece, piece + taken, taken * 2, ""))
        text = text[:at] + changed + text[at + len(taken) :]
    content = text.encode(errors="surrogatepass")
    if rng.random() < 0.2:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + rng.randbytes(rng.randrange(1, 5)) + content[at:]
    return content


def test_a_changed_file_is_read_or_refused_by_its_name(cases: Any, tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web/Dockerfile").write_text("FROM a\n")
    read, refused = 0, list[str]()
    for seed in cases(400):
        (tmp_path / FILE).write_bytes(broken(random.Random(str(seed))))
        try:
            found = read_compose(tmp_path, {})
        except UnusableTask as error:
            refused.append(str(error))
            continue
        read += 1
        assert found.main in found.services
        assert len(found.services) <= MOST_SERVICES
        for one in found.services:
            if one.image is not None and one.image.build is not None:
                assert one.image.build.is_relative_to(tmp_path)
    assert all(one.startswith(f"environment/{FILE}: ") and len(one) < 1000 for one in refused)
    assert refused
    assert read, "no changed file is read any more, so that nothing of one was checked"
