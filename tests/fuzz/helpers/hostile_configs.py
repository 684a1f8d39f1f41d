"""Hostile configs and overrides, each made from a random generator.

`loss.import_path` and `advantage.import_path` are left out: to import them is what they are for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from composer_mesh.configs.schema import Config
from composer_mesh.configs.schema_keys import sections_of

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
SMALL = '[run]\nname = "small"\nsteps = 1\n[data]\ntask = "toolbox"\n[eval]\nepisodes = 2\n'
PRESET = QUICKSTART.read_bytes().replace(b"episodes = 200", b"episodes = 2")

NUMBERS = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "-0.0",
        "0.5",
        "1e-320",
        "1e308",
        "1.8e308",
        "-1e308",
        "nan",
        "inf",
        "-inf",
    ),
    *("1000", "1001", "4096", "1000000", "1000000000", "1000000000000", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "9" * 4300, "9" * 5000),
    *("0x" + "f" * 5000, "0b1" + "0" * 9000, "1e" + "9" * 500, "0." + "3" * 5000, "1_0_0"),
)
TEXTS = (
    *(
        "",
        " ",
        "a",
        "a" * 300,
        "a" * 20_000,
        "../x",
        "/dev/zero",
        "/dev/stdin",
        ".",
        "/",
        "~",
        "nan",
    ),
    *(
        "\x00",
        "a\x00b",
        "\x1b[2J",
        "\u202e",
        "\n",
        "\x7f\x9b",
        "é" * 200,
        "\U0001f600",
        "{",
        "{0.__class__}",
    ),
    *(
        "a/" * 3000,
        "none",
        "custom",
        "builtin",
        "openai",
        "vllm",
        "hosts",
        "gsm8k",
        "slurm",
        "fsdp2",
        "ema",
    ),
    *(
        "tls://a:99999",
        "tcp://[::]:1",
        "http://",
        "10.0.0.0/33",
        "::/0",
        "24:00:00:00",
        "%s%n",
        "$HOME",
    ),
)
WORDS = (
    "run",
    "steps",
    "a",
    "x" * 300,
    "é",
    "-",
    "0",
    "type",
    "",
    "trainer",
    "\x1b",
    "a" * 20_000,
    "\u202e",
)


def quoted(text: str) -> str:
    """TOML's basic string of a text."""
    return (
        json.dumps(text, ensure_ascii=True)
        .replace("\\ud83d\\ude00", "\\U0001f600")
        .replace("\x7f", "\\u007f")
    )


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every key of the schema, with the bounds of its number."""
    for name, field in section.model_fields.items():
        if name != "import_path":
            yield prefix + name, [bound for one in field.metadata for bound in vars_of(one)]
        for one in sections_of(field.annotation):
            yield from keys(one, f"{prefix}{name}.")


def vars_of(metadata: Any) -> Iterator[float]:
    yield from (
        getattr(metadata, name) for name in ("ge", "gt", "le", "lt") if hasattr(metadata, name)
    )


BOUNDS = dict(keys(Config))
KEYS = sorted(BOUNDS)
COUNTED = [
    key
    for key in KEYS
    if BOUNDS[key] and "." in key and not key.startswith(("placement.hosts.", "replay.teachers."))
]


def value(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return quoted(rng.choice(TEXTS))
    if kind == 7:
        return rng.choice(
            ("true", "false", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "2021-02-30", "")
        )
    items = [] if depth > 3 else [value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5)))]
    if kind == 8:
        return f"[{', '.join(items)}]"
    return "{" + ", ".join(f"{quoted(rng.choice(WORDS))} = {one}" for one in items) + "}"


def plain_value(rng: random.Random) -> str:
    """A value that many keys may have, at or beyond its bound."""
    return rng.choice(
        (
            "0",
            "1",
            "2",
            "0.25",
            "1.0",
            "64",
            "1000",
            "4096",
            "1000000",
            "true",
            '"a"',
            '"none"',
            "[]",
            "{}",
        )
    )


def with_bounds(rng: random.Random) -> str:
    """A small run in which numbers stand at their bounds, or one beside them."""
    table = {
        "run.name": '"small"',
        "run.steps": "1",
        "data.task": '"toolbox"',
        "eval.episodes": "2",
    }
    for key in rng.sample(COUNTED, rng.choice((1, 1, 1, 2, 3))):
        table[key] = repr(rng.choice(BOUNDS[key]) + rng.choice((0, 0, 0, 1, -1)))
    return "\n".join(f"{key} = {one}" for key, one in table.items())


def with_values(rng: random.Random) -> str:
    """A small run with hostile values at keys that the schema has."""
    chosen = rng.sample(KEYS, rng.choice((1, 1, 2, 4)))
    top = {"run.name": '"small"', "run.steps": "1", "data.task": '"toolbox"', "eval.episodes": "2"}
    top |= {key: (value if rng.random() < 0.7 else plain_value)(rng) for key in chosen}
    return "\n".join(f"{key} = {one}" for key, one in top.items())


def with_unknown_keys(rng: random.Random) -> str:
    lines = [SMALL]
    for number in range(rng.choice((1, 3, 30, 3000 if rng.random() < 0.03 else 5))):
        name = rng.choice((quoted(rng.choice(WORDS)), f"t{number}", rng.choice(KEYS)))
        lines.append(
            rng.choice(
                (f"[{name}{number}]", f"[[{name}]]", f"{name} = {value(rng, 3)}", f"[{name}]")
            )
        )
    return "\n".join(lines)


def with_depth(rng: random.Random) -> str:
    depth = rng.choice((10, 19, 21, 60, 300, 400, 1000, 5000, 60_000))
    key = rng.choice(("loss.kwargs.a", "trainer.lr", "x", "generator.vllm.engine_args.a"))
    shapes = (
        f"{key} = {'[' * depth}{']' * rng.choice((0, depth))}",
        f"{key} = {'{a = ' * depth}1{'}' * depth}",
        f"{'.'.join(['a'] * depth)} = 1",
        f"[{'.'.join(['loss'] * depth)}]",
        f"{' . '.join(['kwargs'] * depth)} = 1",
        "\n".join(f"{key}{'.b' * min(n, 70)} = 1" for n in range(min(depth, 300))),
    )
    return rng.choice(shapes) + "\n" + SMALL


def with_broken_text(rng: random.Random) -> bytes:
    text = bytearray(rng.choice((SMALL.encode(), PRESET)))
    for _ in range(rng.choice((1, 1, 3, 20))):
        start = rng.randrange(len(text))
        end = min(len(text), start + rng.choice((1, 1, 4, 40)))
        piece = rng.choice(
            (b"", bytes([rng.randrange(256)]), bytes(text[start:end]) * 2, b'"', b"'''", b"[", b"=")
        )
        text[start:end] = piece
        text = text or bytearray(b"=")
    return bytes(text)


def config_of(rng: random.Random) -> bytes:
    """A hostile config of any kind."""
    made = rng.choice(MAKERS)(rng)
    return made if isinstance(made, bytes) else made.encode()


MAKERS: tuple[Callable[[random.Random], str | bytes], ...] = (
    *(with_values,) * 5,
    with_bounds,
    *(with_unknown_keys,) * 2,
    with_depth,
    with_broken_text,
)


def overrides(rng: random.Random) -> list[str]:
    if rng.random() < 0.8:
        return []
    key = rng.choice(
        (*KEYS, "replay.teachers.0.name", "x.y", "a." * 5000, "run.steps.9" + "9" * 5000, *WORDS)
    )
    given = rng.choice((*NUMBERS, *TEXTS, "[" * 3000, value(rng)))
    return [rng.choice((f"{key}={given}", f"{key}={given}", key, f"={given}"))]
