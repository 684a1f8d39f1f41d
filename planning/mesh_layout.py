"""The mesh that a config asks for: actors, processes, threads, transports.

A plan only: `composer-mesh check` prints it and the assembly spawns it. Knows no
Monarch, and cannot see which network hardware a machine has.
"""

from dataclasses import dataclass
from typing import Literal

from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.schema import Config
from composer_mesh.configs.weights import WeightsConfig, WeightTransport

ActorKind = Literal[
    "trainer",
    "generator",
    "environment",
    "sdpo_teacher",
    "hint_writer",
    "teacher_replay",
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
    """One kind of actor; each replica lives in a process of its own."""

    kind: ActorKind
    role: str
    replicas: int
    threads: int

    @property
    def processes(self) -> int:
        """Processes of all replicas."""
        return self.replicas

    @property
    def names(self) -> tuple[str, ...]:
        """What its processes are called when they first start."""
        if self.kind in NEVER_NUMBERED or (self.kind in ALONE_UNNUMBERED and self.replicas == 1):
            return (self.kind,)
        return tuple(f"{self.kind}-{number}" for number in range(self.replicas))


@dataclass(frozen=True)
class TransportRow:
    """What travels from whom to whom, and how."""

    what: str
    source: str
    targets: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        """`teacher teacher_outputs: sdpo_teacher -> trainer: RDMA buffers`."""
        return f"{self.what}: {self.source} -> {', '.join(self.targets)}: {self.how}"


@dataclass(frozen=True)
class ChannelRow:
    """One term of the loss; a weight of 0 turns it off."""

    name: Literal["policy", "sdpo", "replay"]
    weight: float

    @property
    def on(self) -> bool:
        """Whether the term is computed at all."""
        return self.weight > 0


@dataclass(frozen=True)
class MeshPlan:
    """Everything the run will start; an actor whose channel is off is not in it."""

    actors: tuple[ActorRow, ...]
    transports: tuple[TransportRow, ...]
    channels: tuple[ChannelRow, ...]

    @property
    def processes(self) -> int:
        """Actor processes of the whole mesh, without the controller's own."""
        return sum(row.processes for row in self.actors)

    @property
    def threads(self) -> int:
        """Compute threads of the whole mesh when everyone is busy."""
        return sum(row.processes * row.threads for row in self.actors)

    def actor(self, kind: ActorKind) -> ActorRow | None:
        """The row of this kind, None when the run does without."""
        return next((row for row in self.actors if row.kind == kind), None)


def plan_mesh(config: Config) -> MeshPlan:
    """What `config` will start; the same config always gives the same plan."""
    actors = (*_ring(config), *_sdpo(config), *_hints(config), *_replay(config), *_experts(config))
    return MeshPlan(actors, _transports(actors, config), _channels(config))


def _ring(config: Config) -> tuple[ActorRow, ...]:
    return (
        ActorRow(
            "trainer",
            "sums the three losses, steps, publishes weights",
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
            f"steps {config.data.kind} episodes, verifies answers, finds error sites",
            replicas=config.environment.replicas,
            threads=1,
        ),
    )


def _sdpo(config: Config) -> tuple[ActorRow, ...]:
    if not config.sdpo.has_own_actors:
        return ()
    role = "reads the hint at error sites, hands over its signal"
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


def _experts(config: Config) -> tuple[ActorRow, ...]:
    if not config.serves_experts:
        return ()
    return (ActorRow("expert_server", "serves the builtin teachers", replicas=1, threads=1),)


def _transports(actors: tuple[ActorRow, ...], config: Config) -> tuple[TransportRow, ...]:
    kinds = [row.kind for row in actors]
    pullers = tuple(kind for kind in kinds if kind in ("generator", "sdpo_teacher"))
    rows = [TransportRow("weights", "trainer", pullers, _weights(config))]
    if "sdpo_teacher" in kinds:
        rows.append(TransportRow("teacher signals", "sdpo_teacher", ("trainer",), RDMA))
    if "teacher_replay" in kinds:
        states = _addresses(config.replay)
        rows.append(TransportRow("frozen states", "teacher_replay", states, CHAT))
    if (asked := config.sdpo.hints.asked) is not None and "hint_writer" in kinds:
        address = asked.url or "expert_server"
        rows.append(TransportRow("errors and hints", "hint_writer", (address,), CHAT))
    rows.append(TransportRow("requests and handles", "controller", tuple(kinds), MESSAGES))
    return tuple(rows)


def _weights(config: Config) -> str:
    """The transport of the weights, and why it is this one."""
    name, reason = weight_transport(config.weights, host_count(config))
    how = {"shm": "shared memory", "rdma": RDMA, "disk": "files"}.get(name, name)
    return f"{how}: {reason}"


def weight_transport(weights: WeightsConfig, hosts: int = 1) -> tuple[WeightTransport, str]:
    """The weight transport of a run on so many hosts, and why it is this one."""
    if weights.transport != "auto":
        return weights.transport, "as weights.transport says"
    if hosts == 1:
        return "shm", "trainer and receivers share one host"
    return "rdma", f"the run has {hosts} hosts"


def host_count(config: Config) -> int:
    """Hosts that a run has, as far as its config says."""
    described = sum(one.count for one in config.placement.hosts)
    return max(1, described, len(config.cluster.workers))


def _addresses(replay: ReplayConfig) -> tuple[str, ...]:
    """Who answers the teachers' questions: the run's own server, and every configured URL."""
    named = [teacher.url or "expert_server" for teacher in replay.teachers]
    return tuple(dict.fromkeys(named))


def _channels(config: Config) -> tuple[ChannelRow, ...]:
    return (
        ChannelRow("policy", 1.0),
        ChannelRow("sdpo", config.sdpo.alpha),
        ChannelRow("replay", config.replay.beta),
    )
