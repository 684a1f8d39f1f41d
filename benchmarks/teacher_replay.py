"""Teacher replay under faults, or against a real server: losses, overspending and throughput.

    python benchmarks/teacher_replay.py [--quick] [--json FILE]
    python benchmarks/teacher_replay.py --base-url http://127.0.0.1:8000/v1 --model NAME

Without a server: a pool of four replicas queries three teachers about states through a proxy that
fails in eighteen ways and keeps its own ledger, under budget limits from "reached at once" to
"never reached". `overspend_usd` is the most that the proxy charged above a limit, `states_lost`
counts states that ended neither with an answer nor with a typed failure of each teacher. With a
server: throughput and latency of the same pool, with that server as all three teachers.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")

from fault_proxy import FaultProxy, Model  # noqa: E402
from report import Report, arguments  # noqa: E402

from composer_mesh.actors.panel.configured import PanelSettings  # noqa: E402
from composer_mesh.actors.provider.client import Retries, TeacherEndpoint, Timeouts  # noqa: E402
from composer_mesh.actors.provider.request_limiter import BreakerRules  # noqa: E402
from composer_mesh.actors.teacher_replay import TeacherReplayActor  # noqa: E402
from composer_mesh.rollouts.budget import BudgetRules  # noqa: E402
from composer_mesh.rollouts.money import Prices, dollars  # noqa: E402
from composer_mesh.rollouts.pairs import (  # noqa: E402
    FrozenState,
    TeacherAnswer,
    TeacherReply,
)
from composer_mesh.services import service  # noqa: E402
from composer_mesh.tasks.playing import SyncSession  # noqa: E402
from composer_mesh.tasks.task import TaskSettings  # noqa: E402
from composer_mesh.tasks.toolbox import ToolboxTask  # noqa: E402

REPLICAS, TEACHERS = 4, ("a", "b", "c")
KEY_ENV = "BENCHMARK_TEACHER_KEY"
KEY = "sk-benchmark-0123456789abcdef"
PROMPT_NANO, COMPLETION_NANO = 1_000, 10_000
PRICES = Prices.per_million(1.0, 10.0)
CEILINGS = (0.02, 0.2, 1.0, 1_000.0)

Answered = dict[str, tuple[list[TeacherReply], float]]


def states_of(count: int) -> tuple[ToolboxTask, list[FrozenState]]:
    """Return the initial states of this many episodes."""
    task = ToolboxTask.create(TaskSettings(seed=0, tool_error_penalty=0.1))
    openings = (SyncSession(task, task.episode("train", index)).state(0) for index in range(count))
    return task, [FrozenState(f"state-{n}", opening, n) for n, opening in enumerate(openings)]


async def ask_all(
    settings: PanelSettings, states: list[FrozenState], at_once: int | None = None
) -> tuple[Answered, float]:
    """Query every state through a new pool; return replies and seconds of each, and in all."""
    limit = asyncio.Semaphore(at_once or len(states))
    async with await service.spawn(TeacherReplayActor, n=REPLICAS, load=(settings,)) as pool:
        found: Answered = {}

        async def ask(state: FrozenState) -> None:
            async with limit:
                began = time.perf_counter()
                replies = await pool.query(state, n=len(settings.teachers))
                found[state.state_id] = (replies, time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*map(ask, states), return_exceptions=True)
        took = time.perf_counter() - began
        await pool.fanout("aclose")
    return found, took


def lost(states: list[FrozenState], found: Answered) -> int:
    """Count states without an answer or a typed failure of each teacher."""
    whole = {
        state_id
        for state_id, (replies, _) in found.items()
        if {reply.teacher for reply in replies} == set(TEACHERS)
    }
    return sum(state.state_id not in whole for state in states)


async def under_faults(report: Report, count: int) -> None:
    task, states = states_of(count)
    rows, overspend, missing = [], 0, 0
    os.environ[KEY_ENV] = KEY
    models = {name: Model(PROMPT_NANO, COMPLETION_NANO) for name in TEACHERS}
    for place, ceiling in enumerate(CEILINGS):
        async with FaultProxy(KEY, models, seed=place) as proxy:
            with TemporaryDirectory() as folder:
                settings = PanelSettings(
                    teachers=tuple(
                        TeacherEndpoint(n, proxy.base_url, n, KEY_ENV, prices=PRICES, max_tokens=64)
                        for n in TEACHERS
                    ),
                    tools=task.tools,
                    timeouts=Timeouts(total_s=4.0, connect_s=2.0, read_s=1.0),
                    retries=Retries(attempts=3, base_s=0.02, cap_s=0.2),
                    breaker=BreakerRules(failures=20, rest_s=0.2),
                    budget=BudgetRules(usd=ceiling),
                    ledger=Path(folder) / "ledger.sqlite",
                    cache=Path(folder) / "answers.sqlite",
                    replicas=REPLICAS,
                )
                found, took = await ask_all(settings, states)
            over = proxy.charged - round(ceiling * 1e9)
            overspend, missing = max(overspend, over), missing + lost(states, found)
            kinds = Counter(_kind(reply) for replies, _ in found.values() for reply in replies)
            rows.append(
                (
                    f"${ceiling:,.2f}",
                    f"${dollars(proxy.charged):.4f}",
                    f"{proxy.requests:,}",
                    f"{took:.1f}",
                    f"{kinds.pop('answered', 0):,}",
                    ", ".join(f"{kind} {n:,}" for kind, n in sorted(kinds.items())),
                )
            )
            report.figures[f"charged_usd_of_{ceiling:g}"] = dollars(proxy.charged)
            report.figures[f"requests_of_{ceiling:g}"] = proxy.requests
    report.print_table(
        f"{count:,} states x {len(TEACHERS)} teachers, {REPLICAS} replicas, all faults",
        ("ceiling", "charged", "requests", "s", "answered", "typed failures"),
        rows,
    )
    report.ratios["overspend_usd"] = dollars(max(0, overspend))
    report.ratios["states_lost"] = missing


def _kind(reply: TeacherReply) -> str:
    return "answered" if isinstance(reply, TeacherAnswer) else reply.kind.value


async def against_server(report: Report, count: int, given: argparse.Namespace) -> None:
    task, states = states_of(count)
    with TemporaryDirectory() as folder:
        settings = PanelSettings(
            teachers=tuple(
                TeacherEndpoint(
                    name,
                    given.base_url,
                    given.model,
                    prices=PRICES,
                    max_tokens=given.max_tokens,
                    concurrency=given.concurrency,
                )
                for name in TEACHERS
            ),
            tools=task.tools,
            timeouts=Timeouts(total_s=given.timeout),
            budget=BudgetRules(usd=1_000.0),
            ledger=Path(folder) / "ledger.sqlite",
            replicas=REPLICAS,
        )
        found, took = await ask_all(settings, states, given.at_once)
    replies = [reply for of_state, _ in found.values() for reply in of_state]
    waits = sorted(reply.latency_s for reply in replies if isinstance(reply, TeacherAnswer))
    kinds = Counter(map(_kind, replies))
    report.figures |= {
        "states": count,
        "answers": kinds["answered"],
        "failures": len(replies) - kinds["answered"],
        "states_per_s": count / took,
        "answers_per_s": kinds["answered"] / took,
        "answer_p50_s": statistics.median(waits) if waits else float("nan"),
        "answer_p95_s": waits[int(0.95 * (len(waits) - 1))] if waits else float("nan"),
    }
    report.print_table(
        f"{count:,} states x {len(TEACHERS)} teachers, {REPLICAS} replicas, one server",
        ("figure", "value"),
        [(name, f"{value:,.3f}") for name, value in report.figures.items()],
    )
    print("replies:", dict(kinds))
    report.ratios["states_lost"] = lost(states, found)


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--base-url", metavar="URL", help="a real server, up to and including /v1")
    parser.add_argument("--model", metavar="NAME", help="the model that is asked there")
    parser.add_argument("--states", type=int, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="of each teacher")
    parser.add_argument("--at-once", type=int, metavar="N", help="states under way; all by default")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S")
    given = parser.parse_args()
    if bool(given.base_url) != bool(given.model):
        parser.error("--base-url and --model go together: give both or neither")
    report = Report("teacher_replay")
    if given.base_url:
        asyncio.run(against_server(report, given.states or (100 if given.quick else 1_000), given))
    else:
        asyncio.run(under_faults(report, given.states or (150 if given.quick else 700)))
    report.finish(given.json)


if __name__ == "__main__":
    main()
