"""The mesh of a config: actors, processes, threads, transports.

A plan that `composer-mesh check` prints and the assembly spawns. It does not depend on Monarch or
on the machine's network hardware.

How many rollout workers a run has: more of them, the more episodes it has in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from composer_mesh.configs.schema import Config
from composer_mesh.configs.teachers import TeacherConfig
from composer_mesh.configs.weights import WeightsConfig, WeightTransport

EPISODES_PER_WORKER = 256
MOST_WORKERS = 16


def rollout_workers(config: Config) -> int:
    """Return the configured number, or one for every `EPISODES_PER_WORKER` episodes in flight."""
    if config.rollouts.workers is not None:
        return config.rollouts.workers
    schedule = config.schedule
    training = schedule.prompts_per_step * schedule.samples_per_group * (schedule.max_lag + 1)
    in_flight = max(training, config.eval.episodes)
    return min(MOST_WORKERS, -(-in_flight // EPISODES_PER_WORKER))


ActorKind = Literal[
    "trainer",
    "generator",
    "environment",
    "rollouts",
    "sdpo_teacher",
    "hint_writer",
    "teacher_replay",
    "judge",
    "reference",
    "expert_server",
]
NEVER_NUMBERED = ("reference", "hint_writer", "expert_server")
ALONE_UNNUMBERED = ("trainer", "sdpo_teacher")
RDMA = "RDMA buffers (ibverbs where present, TCP otherwise)"
MESSAGES = "Monarch messages"
CHAT = "OpenAI chat protocol over HTTP"


@dataclass(frozen=True)
class ActorRow:
    """One kind of actor; each replica has its own process."""

    kind: ActorKind
    role: str
    replicas: int
    threads: int

    @property
    def processes(self) -> int:
        """Number of processes of all replicas."""
        return self.replicas

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its processes at their first start."""
        if self.kind in NEVER_NUMBERED or (self.kind in ALONE_UNNUMBERED and self.replicas == 1):
            return (self.kind,)
        return tuple(f"{self.kind}-{number}" for number in range(self.replicas))


@dataclass(frozen=True)
class TransportRow:
    """One kind of transferred data, its source, its targets, and the transport."""

    what: str
    source: str
    targets: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        """Format as `teacher signals: sdpo_teacher -> trainer: RDMA buffers`."""
        return f"{self.what}: {self.source} -> {', '.join(self.targets)}: {self.how}"


@dataclass(frozen=True)
class ChannelRow:
    """One term of the loss; weight 0 turns it off."""

    name: str
    weight: float

    @property
    def on(self) -> bool:
        """Whether the term is computed."""
        return self.weight > 0


@dataclass(frozen=True)
class MeshPlan:
    """All actors the run will start, without those of channels that are off."""

    actors: tuple[ActorRow, ...]
    transports: tuple[TransportRow, ...]
    channels: tuple[ChannelRow, ...]

    @property
    def processes(self) -> int:
        """Number of actor processes in the mesh, without the controller."""
        return sum(row.processes for row in self.actors)

    @property
    def threads(self) -> int:
        """Number of compute threads in the mesh."""
        return sum(row.processes * row.threads for row in self.actors)

    def actor(self, kind: ActorKind) -> ActorRow | None:
        """Return the row of this kind, None if the run has none."""
        return next((row for row in self.actors if row.kind == kind), None)


def plan_mesh(config: Config) -> MeshPlan:
    """Return the mesh that `config` will start; deterministic."""
    parts = (_ring, _sdpo, _hints, _replay, _judges, _experts)
    actors = tuple(row for part in parts for row in part(config))
    return MeshPlan(actors, _transports(actors, config), _channels(config))


def _ring(config: Config) -> tuple[ActorRow, ...]:
    tasks = ", ".join(one.task for one in config.data.tasks)
    backend = config.trainer.backend
    role = "sums the three losses, steps, publishes weights"
    return (
        ActorRow(
            "trainer",
            role if backend is None else f"{role}, of the model of {backend.import_path}",
            replicas=config.trainer.ranks,
            threads=config.trainer.threads,
        ),
        ActorRow(
            "generator",
            "samples tokens with log-probs and policy versions",
            replicas=config.generator.replicas,
            threads=config.generator.threads,
        ),
        ActorRow(
            "environment",
            f"steps {tasks} episodes, verifies answers, finds error sites",
            replicas=config.environment.replicas,
            threads=1,
        ),
        ActorRow(
            "rollouts",
            "plays episodes between generators and environments",
            replicas=rollout_workers(config),
            threads=1,
        ),
    )


def _sdpo(config: Config) -> tuple[ActorRow, ...]:
    if not config.sdpo.has_own_actors:
        return ()
    other = config.sdpo.teacher_model
    role = "reads the hint at error sites, hands over its signal"
    if other is not None:
        role = f"{role}, as the model in {other.path}"
    replicas, threads = config.sdpo.replicas, config.sdpo.threads
    return (ActorRow("sdpo_teacher", role, replicas=replicas, threads=threads),)


def _hints(config: Config) -> tuple[ActorRow, ...]:
    if not config.asks_for_hints:
        return ()
    role = "asks a language model to word hints, within its budget"
    return (ActorRow("hint_writer", role, replicas=1, threads=1),)


def _replay(config: Config) -> tuple[ActorRow, ...]:
    replay = config.replay
    if not replay.on:
        return ()
    role = f"asks {replay.ask} of {len(replay.teachers)} teachers about frozen states"
    pool = ActorRow("teacher_replay", role, replicas=replay.actors, threads=1)
    if not replay.needs_reference:
        return (pool,)
    return (pool, ActorRow("reference", "scores pairs as the frozen initial policy", 1, 1))


def _judges(config: Config) -> tuple[ActorRow, ...]:
    judges = config.judges
    if not judges.on:
        return ()
    role = f"asks {len(judges.models)} judges for rewards, within ${judges.budget.usd:,.2f}"
    return (ActorRow("judge", role, replicas=judges.actors, threads=1),)


def _experts(config: Config) -> tuple[ActorRow, ...]:
    if not config.serves_experts:
        return ()
    return (ActorRow("expert_server", "serves the builtin teachers", replicas=1, threads=1),)


def _transports(actors: tuple[ActorRow, ...], config: Config) -> tuple[TransportRow, ...]:
    kinds = [row.kind for row in actors]
    pulling = ("generator", "sdpo_teacher") if config.sdpo.pulls_weights else ("generator",)
    pullers = tuple(kind for kind in kinds if kind in pulling)
    rows = [TransportRow("weights", "trainer", pullers, _weights(config))]
    if "sdpo_teacher" in kinds:
        rows.append(TransportRow("teacher signals", "sdpo_teacher", ("trainer",), RDMA))
    if "teacher_replay" in kinds:
        states = _addresses(config.replay.teachers)
        rows.append(TransportRow("frozen states", "teacher_replay", states, CHAT))
    if "judge" in kinds:
        judges = _addresses(config.judges.models)
        rows.append(TransportRow("questions", "environment", ("judge",), MESSAGES))
        rows.append(TransportRow("questions", "judge", judges, CHAT))
    if (asked := config.sdpo.hints.active_writer) is not None and "hint_writer" in kinds:
        address = asked.url or "expert_server"
        rows.append(TransportRow("errors and hints", "hint_writer", (address,), CHAT))
    rows.append(TransportRow("requests and handles", "controller", tuple(kinds), MESSAGES))
    return tuple(rows)


def _weights(config: Config) -> str:
    """Return the transport of the weights, and the reason."""
    name, reason = weight_transport(config.weights, host_count(config))
    how = {"shm": "shared memory", "rdma": RDMA, "disk": "files"}.get(name, name)
    return f"{how}: {reason}"


def weight_transport(weights: WeightsConfig, hosts: int = 1) -> tuple[WeightTransport, str]:
    """Return the weight transport of a run with this many hosts, and the reason."""
    if weights.transport != "auto":
        return weights.transport, "as weights.transport says"
    if hosts == 1:
        return "shm", "trainer and receivers share one host"
    return "rdma", f"the run has {hosts} hosts"


def host_count(config: Config) -> int:
    """Return the number of hosts of a run, as far as the config describes them."""
    described = sum(one.count for one in config.placement.hosts)
    return max(1, described, len(config.cluster.workers))


def _addresses(models: Sequence[TeacherConfig]) -> tuple[str, ...]:
    """Return the servers of models: the run's own, and every configured URL."""
    named = [one.url or "expert_server" for one in models]
    return tuple(dict.fromkeys(named))


def _channels(config: Config) -> tuple[ChannelRow, ...]:
    return (
        ChannelRow("policy", 1.0),
        *(ChannelRow(name, one.peak) for name, one in config.weighted_channels.items()),
    )
