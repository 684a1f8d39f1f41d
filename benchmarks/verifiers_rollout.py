"""What a rollout costs that verifiers plays, besides the tokens.

    python benchmarks/verifiers_rollout.py [--python FILE] [--quick] [--json FILE]

One question and one answer, which is there at once, by the harness `null` of verifiers and by
`in_process_chat` of ours. Needs the environment of `nox -s verifiers --install-only`. CPU
seconds are those of the driver and of all that it started, without its start and its first
rollout. `--quick` plays fewer rollouts.
"""

import asyncio
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from report import Report, arguments

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.plugins.frameworks.verifiers.driver_process import DriverProcess
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode

RATIO = "in_process_over_null_cpu"
ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".nox/verifiers/bin/python"
ENVIRONMENTS = ROOT / "tests" / "verifiers" / "environments"
AT_ONCE, START_S = 8, 600.0
SAMPLING = Sampling(1.0, 16, 512, 7)


@dataclass(frozen=True)
class Cost:
    """Of one rollout by one harness."""

    alone_s: float
    together_s: float
    cpu_s: float


class Instant:
    """A generation that has its answer at once."""

    def __init__(self, chat: ChatFormat) -> None:
        self._ids = chat.action("it is 2")

    async def generate(self, request: GenerationRequest, _group: str) -> GenerationResult:
        count = len(self._ids)
        return GenerationResult(request.request_id, self._ids, [-1.0] * count, [1] * count, "stop")


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=PYTHON, help="the one that has verifiers")
    given = parser.parse_args()
    if not given.python.exists():
        report = Report("verifiers_rollout")
        report.missing[RATIO] = (
            f"verifiers is not installed in {given.python}: nox -s verifiers --install-only"
        )
        report.finish(given.json)
    os.environ[IMPORT_PATHS] = str(ENVIRONMENTS)
    rounds = {"in_process_chat": 1 if given.quick else 4, "null": 1}
    costs = {name: cost(given.python, name, count) for name, count in rounds.items()}
    report = filled(costs)
    report.finish(given.json)
    return 0


def cost(python: Path, harness: str, rounds: int) -> Cost:
    """Start a driver twice, once for one rollout, and play rounds more in the second one."""
    idle = cpu_of(lambda: asyncio.run(timed(driver(python, harness), 0)))
    walls: list[float] = []
    cpu = cpu_of(lambda: walls.extend(asyncio.run(timed(driver(python, harness), rounds))))
    played = rounds * 2 * AT_ONCE
    return Cost(walls[0], walls[1], (cpu - idle) / played)


def cpu_of(work: Callable[[], object]) -> float:
    """CPU seconds of the processes that end within some work."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def driver(python: Path, harness: str) -> DriverProcess:
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "small_sums"}, "agent": agent}
    settings = {"env": env, "client": "eval", "renderer": None, "max_concurrent": AT_ONCE}
    return DriverProcess(python, settings, START_S)


async def timed(playing: DriverProcess, rounds: int) -> list[float]:
    """Seconds for a rollout, one after another and side by side, after one that is not timed."""
    tokenizer = build_tokenizer(["1 plus 2? it is 2"] * 40, 320)
    chat = ChatFormat(tokenizer, [])
    async with AgentEndpoint(Instant(chat), chat, len(tokenizer)) as endpoint:

        async def one(index: int) -> None:
            sample = Sample(Episode("task", "train", index, {}), index, 0, SAMPLING)
            async with endpoint.episode(sample, SAMPLING) as opened:
                played = await playing.play(index % 24, opened.base_url, opened.api_key)
            assert played.scored()[0].reward > 0, played

        await one(0)
        starts = [time.perf_counter()]
        for index in range(rounds * AT_ONCE):
            await one(index)
        starts.append(time.perf_counter())
        for _ in range(rounds):
            await asyncio.gather(*(one(index) for index in range(AT_ONCE)))
        starts.append(time.perf_counter())
    playing.close()
    return [(b - a) / max(rounds, 1) / AT_ONCE for a, b in pairwise(starts)]


def filled(costs: dict[str, Cost]) -> Report:
    report = Report("verifiers_rollout")
    rows = []
    for name, one in costs.items():
        rows.append([name, f"{one.alone_s:.2f}", f"{one.together_s:.2f}", f"{one.cpu_s:.2f}"])
        report.figures |= {f"{name}/alone_s": one.alone_s, f"{name}/cpu_s": one.cpu_s}
        report.figures[f"{name}/together_s"] = one.together_s
    columns = ["harness", "alone, s", f"{AT_ONCE} at once, s each", "CPU, s each"]
    report.print_table("A rollout of one question and one answer", columns, rows)
    report.ratios[RATIO] = costs["in_process_chat"].cpu_s / costs["null"].cpu_s
    return report


if __name__ == "__main__":
    raise SystemExit(main())
