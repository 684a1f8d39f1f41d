"""Prefix reuse of multi-turn sessions in groups of 8, on 1, 2 and 4 engines with sticky routing.

    python benchmarks/generator_turns.py [--quick] [--json FILE]

All members of a group, and all turns of a session, go to one engine. Sessions begin one by one and
pause between turns, as tools make them, and there are more of them than an engine has rows.
`prefix_hit` is the share of prompt tokens whose keys were reused, of 2 and 4 engines over that of
one. `computed_over_needed` is the number of prompt tokens computed over those of the prefix tree of
all prompts that no answer has computed: what one engine that forgets nothing must compute. Without
--quick also with any engine for any turn, as a comparison. Where vLLM is installed, the same with
vLLM; its part is reported as missing otherwise. `--quick` has fewer and shorter sessions.
"""

import asyncio
import importlib.util
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")

from generator_actors import actors, prefix_config  # noqa: E402
from generator_ways import TINY, Size, model_of  # noqa: E402
from report import Report, arguments  # noqa: E402

from composer_mesh.actors.engines.embedded import EmbeddedEngine  # noqa: E402
from composer_mesh.actors.engines.loop import EngineLoop, EngineThread  # noqa: E402
from composer_mesh.configs.schema import Config  # noqa: E402
from composer_mesh.mesh.waiting import cancel_and_wait  # noqa: E402
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult  # noqa: E402

Ask = Callable[[GenerationRequest], Awaitable[GenerationResult]]
Engines = AbstractAsyncContextManager[list[Ask]]

ROWS = 16
COUNTS = (1, 2, 4)
PAUSE_S = 0.05
"""The longest pause before a turn."""


@dataclass(frozen=True)
class Load:
    """Groups of sessions, and their tokens: of a common header, a question, each turn."""

    groups: int
    turns: int
    members: int = 8
    header: int = 256
    question: int = 64
    answer: int = 32
    observation: int = 256

    @property
    def context(self) -> int:
        """Tokens of a session at its end."""
        return self.header + self.question + self.turns * (self.answer + self.observation)

    @property
    def sampled(self) -> int:
        """Tokens of all answers."""
        return self.groups * self.members * self.turns * self.answer

    @property
    def kept(self) -> int:
        """Tokens of all sessions, whatever they have in common."""
        return self.groups * self.members * self.context


@dataclass
class Counts:
    """Prompt tokens requested, reused, and in the prefix tree of all prompts."""

    prompt: int = 0
    cached: int = 0
    _tree: set[int] = field(default_factory=set)
    _decoded: set[int] = field(default_factory=set)

    def add(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Count a turn. Decoding computes every sampled token but the last one of a turn."""
        self.prompt += len(request.prompt_ids)
        self.cached += result.cached_tokens
        prefixes = prefix_hashes([*request.prompt_ids, *result.token_ids[:-1]])
        self._tree.update(prefixes[: len(request.prompt_ids)])
        self._decoded.update(prefixes[len(request.prompt_ids) :])

    @property
    def hit(self) -> float:
        return self.cached / self.prompt

    @property
    def computed(self) -> int:
        return self.prompt - self.cached

    @property
    def needed(self) -> int:
        """Tokens of the prefix tree that no answer computes."""
        return len(self._tree - self._decoded)


def prefix_hashes(ids: list[int]) -> list[int]:
    """Return a number for each prefix of a sequence; equal prefixes have equal numbers."""
    found, last = [], 0
    for token in ids:
        last = hash((last, token))
        found.append(last)
    return found


async def play(
    load: Load, engines: list[Ask], *, sticky: bool = True, pause_s: float = PAUSE_S
) -> Counts:
    """Play all sessions at once; the engine of a group is that with its number."""
    counts, header = Counts(), ids(random.Random(0), load.header)

    async def session(group: int, member: int) -> None:
        rng = random.Random(group * load.members + member)
        prompt = header + ids(random.Random(-1 - group), load.question)
        for turn in range(load.turns):
            await asyncio.sleep(rng.uniform(0, pause_s))
            place = group if sticky else rng.randrange(len(engines))
            request = GenerationRequest(
                f"{group}-{member}-{turn}",
                list(prompt),
                load.answer,
                1.0,
                rng.randrange(1 << 40),
                [],
            )
            result = await engines[place % len(engines)](request)
            counts.add(request, result)
            prompt += result.token_ids + ids(rng, load.observation)

    await asyncio.gather(
        *(session(group, member) for group in range(load.groups) for member in range(load.members))
    )
    return counts


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, 256) for _ in range(count)]


@asynccontextmanager
async def embedded_engines(
    size: Size, count: int, rows: int, context: int, kept: int | None
) -> AsyncIterator[list[Ask]]:
    """Yield embedded engines of this process, each with a thread, that keep so many tokens."""
    loops = [
        EngineLoop(
            EmbeddedEngine(model_of(size), rows, context, prefix_tokens=kept), EngineThread()
        )
        for _ in range(count)
    ]
    serving = [asyncio.create_task(loop.serve()) for loop in loops]
    try:
        yield [loop.ask for loop in loops]
    finally:
        await cancel_and_wait(serving)
        for loop in loops:
            await loop.close()


@asynccontextmanager
async def asks(config: Config, count: int) -> AsyncIterator[list[Ask]]:
    async with actors(config, count) as (_, found):
        yield found


def embedded(load: Load, count: int) -> Engines:
    return embedded_engines(TINY, count, ROWS, load.context, load.kept)


async def compare(report: Report, name: str, load: Load, start: Callable[[int], Engines]) -> None:
    """Play the load on 1, 2 and 4 engines; sets the ratios to the worst of them."""
    rows, alone = [], 0.0
    for count in COUNTS:
        async with start(count) as engines:
            counts = await play(load, engines)
        alone = alone or counts.hit
        over = counts.computed / counts.needed
        note(report, f"{name} {count}", counts)
        rows.append([str(count), f"{counts.hit:.4f}", f"{counts.hit / alone:.4f}", f"{over:.4f}"])
        if count > 1:
            lowest = report.ratios.get("prefix_hit", 1.0)
            report.ratios["prefix_hit"] = min(lowest, counts.hit / alone)
        highest = report.ratios.get("computed_over_needed", 0.0)
        report.ratios["computed_over_needed"] = max(highest, over)
    title = (
        f"{name}: {load.groups} groups of {load.members}, {load.turns} turns, up to "
        f"{load.context} tokens"
    )
    report.print_table(title, ["engines", "hit", "of one's", "computed / needed"], rows)


def note(report: Report, name: str, counts: Counts) -> None:
    report.figures[f"{name} prefix_hit"] = round(counts.hit, 4)
    report.figures[f"{name} computed"] = counts.computed
    report.figures[f"{name} needed"] = counts.needed


async def unsticky(report: Report, load: Load) -> None:
    """Measure four engines without sticky routing."""
    name = "embedded 4, any engine"
    async with embedded(load, 4) as engines:
        counts = await play(load, engines, sticky=False)
    note(report, name, counts)
    row = [name, f"{counts.hit:.4f}", str(counts.computed), str(counts.needed)]
    report.print_table("besides", ["", "hit", "computed", "needed"], [row])


async def measure(report: Report, quick: bool) -> None:
    load = Load(groups=4, turns=3) if quick else Load(groups=8, turns=4)
    await compare(report, "embedded", load, lambda count: embedded(load, count))
    if not quick:
        await unsticky(report, load)
    if importlib.util.find_spec("vllm") is None:
        report.missing["prefix_hit of vLLM"] = "vLLM is not installed: nox -s vllm, for the CPU"
        return
    config = prefix_config("vllm", ROWS, load.context, load.kept)
    await compare(report, "vllm", load, lambda count: asks(config, count))


def main() -> None:
    import torch

    options = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    report = Report("generator_turns")
    asyncio.run(measure(report, options.quick))
    report.finish(options.json)


if __name__ == "__main__":
    main()
