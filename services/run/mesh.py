"""The actors of one run: starts those that the config needs, loads them, reports their status.

The controller coordinates their work; the supervisor handles their deaths.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from composer_mesh.actors.expert_server import ExpertServerActor
from composer_mesh.actors.experts.http import Expert, new_token
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.actors.reference import ReferenceActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import cause_of
from composer_mesh.mesh.heartbeat import Busy, HeartbeatRules
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, Recorder
from composer_mesh.mesh.waiting import together
from composer_mesh.planning.placement_solver import with_checkpointing
from composer_mesh.services.checks.keys import keys_of
from composer_mesh.services.directory.status import ActorStatus
from composer_mesh.services.inspection.tree import CpuMeter
from composer_mesh.services.pool.process_placement import ProcessPlacements
from composer_mesh.services.replay.teacher_settings import panel_settings
from composer_mesh.services.run.pools import MeshHintWriter, MeshJudges, Pools
from composer_mesh.services.service import Service
from composer_mesh.services.training.rank_processes import TrainerRanks
from composer_mesh.services.training.teaching import SdpoTeachers
from composer_mesh.services.training.turns import DeviceTurns
from composer_mesh.tasks.task import Task

DESCRIBE_DEADLINE_S = 5.0

RunHalf = Literal["both", "training", "sampling"]
"""Which actors a run has: all, the trainer with its SDPO teachers, or the rollout actors."""


class NotStarted(LookupError):
    """The requested actor is not part of this partial run."""


@dataclass(frozen=True)
class RunMesh:
    """The live actors of a run, without those of disabled channels or of the other partial run."""

    config: Config
    host: MeshHost
    half: RunHalf
    turns: DeviceTurns | None
    """The turns of the actors that share GPUs; None where each keeps its own."""
    trainers: TrainerRanks
    sampling: tuple[Service, Service, Service] | None
    teachers: SdpoTeachers | None
    replay: Service | None
    reference: Service | None
    experts: Service | None
    hints: MeshHintWriter | None
    judges: MeshJudges | None
    keys: Keys = field(repr=False)
    token: str = field(repr=False)
    _cpu: CpuMeter[str] = field(default_factory=CpuMeter, init=False, repr=False)

    @property
    def generators(self) -> Service:
        """The pool of generators; raises NotStarted in a run without them."""
        return self._sampling[0]

    @property
    def environments(self) -> Service:
        """The pool of environments; raises NotStarted in a run without them."""
        return self._sampling[1]

    @property
    def rollouts(self) -> Service:
        """The pool of rollout workers; raises NotStarted in a run without them."""
        return self._sampling[2]

    @property
    def _sampling(self) -> tuple[Service, Service, Service]:
        if self.sampling is None:
            raise NotStarted("this run has no generators: it trains stored rollouts")
        return self.sampling

    @classmethod
    async def start(
        cls,
        config: Config,
        host: MeshHost,
        record: Recorder,
        keys: Keys,
        half: RunHalf = "both",
        placements: ProcessPlacements | None = None,
    ) -> "RunMesh":
        """Start all processes concurrently at their placements. Waits until each actor answers.

        `keys` are the API keys of the run, which only the actors that use them receive. A run that
        only samples has a trainer for a warm start alone, none for a policy of the user's own.
        """
        rules = config.supervision
        host.heartbeat = HeartbeatRules(rules.heartbeat_s, rules.hang_s)
        host.deadlines.most = rules.restarts
        placements = placements or ProcessPlacements.of(config)
        config = with_checkpointing(config, placements.recomputes)
        for note in placements.notes:
            record("placement", "", note)
        start, token = Pools(config, host, placements, record), new_token()
        words = keys_of(config, "hint_writer", keys, token)
        samples, trains, whole = half != "training", half != "sampling", half == "both"
        turn = asyncio.Event() if whole and config.placement.colocate else None
        taker = placements.taker("sdpo_teacher")
        teachers = SdpoTeachers(config, host, taker, record, turn=turn)
        trainers = TrainerRanks(config, host, placements.taker("trainer"))
        own_teachers = trains and config.sdpo.has_own_actors
        judged = samples and config.judges.on
        _, sampled, replay, reference, _, experts, hints, judge_pool = await together(
            _if(trains or config.policy.path is None, trainers.start),
            _if(samples, start.sampling),
            _if(whole and config.replay.on, start.teachers),
            _if(whole and config.replay.needs_reference, start.one, "reference", ReferenceActor),
            _if(own_teachers, teachers.start),
            _if(whole and config.serves_experts, start.one, "expert_server", ExpertServerActor),
            _if(whole and config.asks_for_hints, start.hint_writer, words),
            _if(judged, start.judges),
        )
        judges: MeshJudges | None = None
        if judge_pool is not None:
            own_keys = keys_of(config, "judge", keys, token)
            judges = MeshJudges(judge_pool, sampled[1], config, own_keys, record)
        turns: DeviceTurns | None = None
        if turn is not None:
            sharing = [sampled[0], *([] if reference is None else [reference])]
            turns = DeviceTurns(trainers, sharing, turn)
            turns.teachers = teachers if own_teachers else None
        return cls(
            config=config,
            host=host,
            half=half,
            turns=turns,
            trainers=trainers,
            sampling=None if sampled is None else tuple(sampled),
            teachers=teachers if own_teachers else None,
            replay=replay,
            reference=reference,
            experts=experts,
            hints=hints,
            judges=judges,
            keys=keys,
            token=token,
        )

    async def prepare(self) -> Path:
        """Return the folder of the initial policy. Waits for a warm start if none is cached.

        A sampling-only run stops the trainer afterwards.
        """
        if self.half == "sampling" and (own := self.config.policy.folder) is not None:
            return own
        folder = await self.trainers.prepare()
        if self.half == "sampling":
            await asyncio.gather(*(self.host.stop(one) for one in self.trainers.all))
        return folder

    async def load(
        self, folder: Path, task: Task, run: Path, checkpoint: Path | None = None
    ) -> None:
        """Load every actor; `run` is the run's directory. Waits for all.

        The trainer resumes from `checkpoint` if one is given. Where actors share GPUs it has the
        first turn, and the others load their models in theirs.
        """
        config, awake = self.config, self.turns is None
        loads: list[Coroutine[Any, Any, Any]] = []
        if self.half != "sampling":
            loads.append(self.trainers.load(folder, checkpoint))
        if self.sampling is not None:
            loads += [self.generators.load(config, folder, awake), self._load_environments()]
            loads.append(
                self.rollouts.load(config, folder, {one.name: one.tools for one in task.parts})
            )
        if self.teachers is not None:
            loads.append(self.teachers.load(folder))
        if self.reference is not None:
            loads.append(self.reference.load(config, folder, awake))
        if self.judges is not None:
            loads.append(self.judges.load(run))
        loads.append(self._load_asking(task, run))
        await asyncio.gather(*loads)
        if self.judges is not None:
            self.judges.connect()

    @property
    def pools(self) -> dict[str, Service]:
        """The run's services by actor kind."""
        hints = None if self.hints is None else self.hints.pool
        generators, environments, rollouts = self.sampling or (None, None, None)
        pools = {
            "generator": generators,
            "environment": environments,
            "rollouts": rollouts,
            "teacher_replay": self.replay,
            "judge": None if self.judges is None else self.judges.pool,
            "reference": self.reference,
            "expert_server": self.experts,
            "hint_writer": hints,
        }
        return {kind: pool for kind, pool in pools.items() if pool is not None}

    @property
    def restarts(self) -> int:
        """Number of processes started as replacements."""
        own = 0 if self.teachers is None else self.teachers.restarts
        return own + sum(pool.restarts for pool in self.pools.values())

    async def close(self) -> None:
        """Stop the pools and cancel replacements: nothing is restarted afterwards."""
        closing = [pool.close() for pool in self.pools.values()]
        if self.judges is not None:
            closing.append(self.judges.close())
        if self.teachers is not None:
            closing.append(self.teachers.close())
        await asyncio.gather(*closing)

    async def _load_asking(self, task: Task, run: Path) -> None:
        """Load the experts first, since the others need their address."""
        url = ""
        if self.experts is not None:
            url = await self._serve_experts(self.experts)
        if self.replay is not None:
            keys = keys_of(self.config, "teacher_replay", self.keys, self.token)
            settings = panel_settings(self.config, url, run, task.tools)
            if len(task.parts) > 1:
                settings = replace(settings, tools_of={one.name: one.tools for one in task.parts})
            await self.replay.load(settings, keys)
        if self.hints is not None:
            await self.hints.load(url, run)

    async def _load_environments(self) -> None:
        keys = keys_of(self.config, "environment", self.keys, self.token)
        await self.environments.load(self.config, keys)

    async def _serve_experts(self, server: Service) -> str:
        """Start the expert server and return its URL, which replacements reuse."""
        teachers = [one for one in self.config.replay.teachers if one.kind == "builtin"]
        experts = [Expert(one.name, one.error_rate or 0.0) for one in teachers]
        await server.load(self.config, experts, self.token)
        url: str = (await server.describe())["base_url"]
        server.remember("load", self.config, experts, self.token, urlsplit(url).port)
        return url

    async def describe(self) -> list[ActorStatus]:
        """Return each actor's status; one that does not answer in seconds, or fails, is busy."""
        described = await asyncio.gather(*(_describe(actor) for actor in self.host.actors))
        used = {actor.name: seconds for actor, seconds in described if seconds is not None}
        percent = self._cpu.look(used)
        return [replace(actor, cpu_percent=percent.get(actor.name)) for actor, _ in described]

    async def take_activity(self) -> list[Busy]:
        """Return the actors' busy intervals since the last request.

        These are the controller's own calls, and those that actors of any host served for others.
        """
        own = self.host.activity.take()
        served = await asyncio.gather(*(actor.take_activity() for actor in self.host.actors))
        return [*own, *chain.from_iterable(served)]


async def _if(wanted: bool, start: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    return await start(*args) if wanted else None


async def _describe(actor: SpawnedActor) -> tuple[ActorStatus, float | None]:
    """Return an actor's status and its process's CPU seconds."""
    known = ActorStatus(actor.name, actor.kind, actor.pid, host=actor.host.name)
    try:
        about = await actor.call("describe", deadline_s=DESCRIBE_DEADLINE_S)
    except DeadlineExceeded:
        return replace(known, state="busy", activity="does not answer now"), None
    except ActorDied as died:
        return replace(known, state="dead", activity=died.reason), None
    except Exception as error:  # noqa: BLE001  whatever was raised there; the others are reported
        return replace(known, state="busy", activity=f"describe failed: {cause_of(error)}"), None
    now = replace(
        known,
        state="ready" if about["activity"].startswith("idle") else "busy",
        policy_version=about["policy_version"],
        activity=about["activity"],
        rss_bytes=about["rss_bytes"],
    )
    return now, about["cpu_seconds"]
