"""The mesh of a config: actors, processes, threads, transports.

A plan that `composer-mesh check` prints and the assembly spawns. It does not depend on Monarch or
on the machine's network hardware.

How many rollout workers a run has: more of them, the more episodes it has in flight.
"""

from collections.abc import Iterator, Sequence
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
    training = config.schedule.groups_in_flight * config.schedule.samples_per_group
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
    replicas: int = 1
    threads: int = 1

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


def plan_mesh(config: Config) -> MeshPlan:
    """Return the mesh that `config` will start; deterministic."""
    actors = (*_ring(config), *_channel_actors(config))
    return MeshPlan(actors, _transports(actors, config), _channels(config))


def _ring(config: Config) -> Iterator[ActorRow]:
    tasks = ", ".join(one.task for one in config.data.tasks)
    backend, trainer, generator = config.trainer.backend, config.trainer, config.generator
    role = "sums the three losses, steps, publishes weights"
    if backend is not None:
        role = f"{role}, of the model of {backend.import_path}"
    yield ActorRow("trainer", role, trainer.ranks, trainer.threads)
    role = "samples tokens with log-probs and policy versions"
    yield ActorRow("generator", role, generator.replicas, generator.threads)
    role = f"steps {tasks} episodes, verifies answers, finds error sites"
    yield ActorRow("environment", role, config.environment.replicas)
    role = "plays episodes between generators and environments"
    yield ActorRow("rollouts", role, rollout_workers(config))


def _channel_actors(config: Config) -> Iterator[ActorRow]:
    sdpo, replay, judges = config.sdpo, config.replay, config.judges
    if sdpo.has_own_actors:
        role = "reads the hint at error sites, hands over its signal"
        if sdpo.teacher_model is not None:
            role = f"{role}, as the model in {sdpo.teacher_model.path}"
        yield ActorRow("sdpo_teacher", role, sdpo.replicas, sdpo.threads)
    if config.asks_for_hints:
        yield ActorRow("hint_writer", "queries a language model for hints, within its budget")
    if replay.on:
        role = f"queries {replay.ask} of {len(replay.teachers)} teachers about frozen states"
        yield ActorRow("teacher_replay", role, replay.actors)
    if replay.needs_reference:
        yield ActorRow("reference", "scores pairs as the frozen initial policy")
    if judges.on:
        role = f"queries {len(judges.models)} judges for rewards, within ${judges.budget.usd:,.2f}"
        yield ActorRow("judge", role, judges.actors)
    if config.serves_experts:
        yield ActorRow("expert_server", "serves the builtin teachers")


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
    if (writer := config.sdpo.hints.active_writer) is not None and "hint_writer" in kinds:
        address = writer.url or "expert_server"
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
