"""Schema of a run: every section, its bounds and the checks between sections.

The sections `[run]` and `[generator]` are here, the others in modules of their own.
Performs no I/O; `load` reads files. Imports neither torch nor Monarch.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from composer_mesh.configs.advantages import TURN_ADVANTAGES, AdvantageConfig, GroupAdvantage
from composer_mesh.configs.base import (
    Concurrent,
    Cores,
    Count,
    CountOrZero,
    FilePath,
    Processes,
    Seconds,
    Section,
    TemperatureAboveZero,
    Tokens,
    TopP,
    repeated,
)
from composer_mesh.configs.channels import ChannelSection, ForeignChannels
from composer_mesh.configs.cluster import ClusterConfig
from composer_mesh.configs.data import DataConfig
from composer_mesh.configs.environment import EnvironmentConfig
from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.configs.logprob_mismatch import LogprobMismatchConfig
from composer_mesh.configs.losses import GrpoLoss, LossConfig
from composer_mesh.configs.placement import PlacementConfig
from composer_mesh.configs.plugins import registered
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.schedule import (
    EvalConfig,
    LateRewardsConfig,
    RolloutsConfig,
    ScheduleConfig,
)
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.configs.sft import SftConfig
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.configs.teachers import JudgesConfig
from composer_mesh.configs.tracking import TrackingConfig
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.configs.vllm import VllmConfig
from composer_mesh.configs.weights import WeightsConfig

S = TypeVar("S", bound=Section)
LARGEST_SEED = 2**31 - 1
MOST_TRACKERS = 20


LONGEST_NAME = 100
"""Characters of a run's name."""


class RunConfig(Section):
    """Settings of the complete run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)]
    """Name of the run and of its directory under runs/."""

    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """Seed of the policy, the episodes and every sampled token."""

    steps: Count
    """Number of optimizer steps."""

    deadline_s: Seconds = 120.0
    """Seconds without an answer or progress after which the work of an actor is ended. Progress is
    a microbatch, a layer, a decoding step, a tensor, a file, or a task's wait for a container.
    Work that reports it may take any time. The work is repeated with twice the time, as often as
    its restarts allow."""

    import_paths: Annotated[tuple[FilePath, ...], Field(strict=False, max_length=100)] = ()
    """Folders with your own modules, such as custom losses; searched after installed packages.
    Relative ones are relative to the working directory of the command."""

    group_readable: bool = False
    """Let the group of the run's files read them; otherwise only the user who started the run
    can."""

    telemetry: bool = False
    """Store messages, spans and failures for `composer-mesh query`, in a process of 400 MB."""


class GeneratorConfig(Section):
    """The actors that sample tokens."""

    engine: Annotated[str, registered("engines")] = "embedded"
    """The inference engine: "embedded" has no further dependencies; "vllm" needs an extra."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the served weights and of the KV cache."""

    quantization: Literal["none", "fp8"] = "none"
    """Weights of the linear layers of the decoder: "fp8" serves them as E4M3 with a scale for each
    row, quantized again at each update, and quantizes their inputs too."""

    replicas: Processes = 1
    """Number of generator actors."""

    max_concurrent: Concurrent = 64
    """Maximum number of requests decoded together: rows of the KV cache."""

    prefix_tokens: CountOrZero | None = None
    """Maximum number of tokens whose keys and values the embedded engine keeps for later prompts; 0
    keeps none. By default it is as many as the rows of the engine hold."""

    cuda_graphs: bool | None = None
    """Whether the embedded engine replays decode steps as CUDA graphs. If not set, it does so on a
    GPU, except for mixtures of experts. `true` is refused where steps cannot be captured."""

    max_new_tokens: Tokens = 40
    """Maximum number of tokens sampled in one turn."""

    temperature: TemperatureAboveZero = 1.0
    """Sampling temperature of training rollouts."""

    top_p: TopP = 1.0
    """Training rollouts sample from the most probable tokens whose probabilities reach this sum."""

    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Training rollouts sample from this number of the most probable tokens; 0 is all."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Training rollouts sample only tokens with at least this share of the largest probability."""

    threads: Cores = 1
    """CPU threads of each generator."""

    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of the vLLM engine; ignored by the embedded one."""


class Config(Section):
    """Complete config of one run: the result of a TOML file and its overrides."""

    run: RunConfig
    """Settings of the complete run."""

    data: DataConfig
    """Source of the episodes."""

    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    """The actors that step episodes."""

    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig)
    """The actors that play episodes."""

    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    """The model that is trained."""

    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    """The actors that sample tokens."""

    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """The optimizer, its microbatches and ranks."""

    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """Transport of weights from the trainer to generators and teachers."""

    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Rollouts per step and their maximum policy lag."""

    loss: LossConfig = Field(default_factory=GrpoLoss)
    """Loss of the policy channel."""

    advantage: AdvantageConfig = Field(default_factory=GroupAdvantage)
    """Conversion of rewards to advantages."""

    logprob_mismatch: LogprobMismatchConfig = Field(default_factory=LogprobMismatchConfig)
    """Alarm thresholds for the log-prob mismatch between trainer and generators."""

    sdpo: SdpoConfig = Field(default_factory=SdpoConfig)
    """The self-distillation channel."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """The teacher-replay channel."""

    channels: ForeignChannels = Field(default_factory=dict)
    """Channels of your own, by name: tables [channels.NAME]."""

    judges: JudgesConfig = Field(default_factory=JudgesConfig)
    """Models that reward functions query."""

    late_rewards: LateRewardsConfig = Field(default_factory=LateRewardsConfig)
    """Rewards that arrive after training."""

    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Cores, GPUs and memory of each process."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Hosts of the run and how they are reached."""

    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig)
    """Restarts, hangs and retries."""

    islands: IslandsConfig = Field(default_factory=IslandsConfig)
    """Averages with other runs over slow links."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out evaluation."""

    sft: SftConfig | None = None
    """Supervised fine-tuning, by `composer-mesh sft`."""

    serve: ServeConfig = Field(default_factory=ServeConfig)
    """Limits of a server of the Tinker protocol."""

    tracking: Annotated[
        tuple[TrackingConfig, ...], Field(strict=False, max_length=MOST_TRACKERS)
    ] = ()
    """Experiment trackers that get the run's figures: tables [[tracking]]."""

    @model_validator(mode="before")
    @classmethod
    def _not_compared_by_default_in_parts(cls, given: Any) -> Any:
        """Let a divided context have no compared actions, unless the config asks for them."""
        match given:
            case {"trainer": {"context_parallel": int(ranks)}, "sdpo": dict(sdpo)} if ranks > 1:
                return {**given, "sdpo": {"advantage_sites": 0, **sdpo}}
        return given

    def section(self, kind: type[S]) -> S:
        """Return a section that a plugin registers; its defaults where the file has none."""
        given = (self.model_extra or {}).values()
        return next((one for one in given if isinstance(one, kind)), None) or kind()

    @property
    def weighted_channels(self) -> dict[str, ChannelSection]:
        """The channels that are added to the policy's, by name, in the order of their losses."""
        return {"sdpo": self.sdpo, "replay": self.replay, **self.channels}

    @property
    def configured_channels(self) -> list[str]:
        """Names of the channels that are on, in the order of their losses."""
        return ["policy", *(name for name, one in self.weighted_channels.items() if one.on)]

    @property
    def own_updates(self) -> list[str]:
        """The channels with an update and an optimizer of their own."""
        return [name for name, one in self.weighted_channels.items() if one.has_own_update]

    @property
    def pairs_wait(self) -> bool:
        """Whether a step waits for the preference pairs of its own rollouts."""
        if self.replay.delivery is None:
            return self.schedule.max_lag == 0
        return self.replay.delivery == "same_step"

    @property
    def syncs_adapters(self) -> bool:
        """Whether generators get adapters alone."""
        return self.trainer.lora is not None and self.trainer.lora.sync == "adapters"

    @property
    def teacher_dtype(self) -> Literal["float32", "bfloat16"]:
        """Precision of the SDPO teacher's weights; an average loses its small steps in bfloat16."""
        return "float32" if self.sdpo.teacher == "ema" else self.trainer.frozen_dtype

    @property
    def publishes_half(self) -> bool:
        """Whether all that receive the trainer's weights keep them in bfloat16."""
        teacher = self.teacher_dtype if self.sdpo.pulls_weights else "bfloat16"
        return self.generator.dtype == teacher == "bfloat16"

    @property
    def asks_for_hints(self) -> bool:
        """Whether a model writes the hints of the SDPO channel."""
        return self.sdpo.on and self.sdpo.hints.active_writer is not None

    @property
    def serves_experts(self) -> bool:
        """Whether the run itself serves a teacher or the hint writer."""
        builtin_writer = self.sdpo.on and self.sdpo.hints.has_builtin_writer
        return builtin_writer or (self.replay.on and self.replay.has_builtin_teachers)

    def _problems(self) -> Iterator[str]:
        if self.sft is not None and self.sft.options and self.data.task is None:
            yield (
                "sft.options are set but data.mixture has several tasks: write options into its "
                "tables, or name one task by data.task"
            )
        for name in repeated(one.title for one in self.tracking):
            yield f"two tables of tracking have the name {name!r}: give each its own name"
        yield from self._quantization_problems()
        yield from self._channel_problems()
        yield from self._rollout_problems()
        yield from self._update_problems()

    def _quantization_problems(self) -> Iterator[str]:
        if self.generator.quantization == "none":
            return
        if self.generator.dtype != "bfloat16":
            yield (
                f"generator.quantization is 'fp8' but generator.dtype is {self.generator.dtype!r}, "
                "in which FP8 products cannot be: set generator.dtype to 'bfloat16'"
            )
        if self.syncs_adapters:
            yield (
                "generator.quantization is 'fp8' but generators get adapters alone, which are not "
                "quantized: set trainer.lora.sync to 'merged', or generator.quantization to 'none'"
            )

    def _channel_problems(self) -> Iterator[str]:
        for name, one in self.weighted_channels.items():
            if one.on and one.schedule.by == "agreement" and not self.replay.on:
                yield (
                    f"{name}.{one.weight_key}_schedule.by is 'agreement' but replay.beta is 0, so "
                    "no teacher is queried: set replay.beta above 0, or by to 'success' or 'steps'"
                )
        shares = {n: one.min_update_share or 0.0 for n, one in self.weighted_channels.items()}
        if (least := sum(shares.values())) >= 1:
            listed = " and ".join(f"{name}.min_update_share" for name in shares if shares[name])
            yield (
                f"{listed} add up to {least:g}, which leaves the policy nothing: lower them to "
                "less than 1 together"
            )
        yield from self._measure_problems()

    def _measure_problems(self) -> Iterator[str]:
        """Yield what needs whole gradients and whole positions, where ranks have parts of them."""
        trainer, sdpo = self.trainer, self.sdpo
        divided = {
            name: size
            for name in ("context_parallel", "expert_parallel")
            if (size := getattr(trainer, name)) > 1
        }
        measured = {
            "trainer.update_share_every": trainer.update_share_every > 0,
            **{
                f"{name}.min_update_share or max_update_share": one.is_bounded
                for name, one in self.weighted_channels.items()
            },
            "sdpo.advantage_sites": "context_parallel" in divided
            and sdpo.on
            and sdpo.advantage_sites > 0,
        }
        for what in (name for name, on in measured.items() if on and divided):
            name, size = next(iter(divided.items()))
            yield (
                f"{what} is set but trainer.{name} is {size}, where a rank has only parts of "
                f"what is measured: remove it, or set trainer.{name} to 1"
            )

    def _rollout_problems(self) -> Iterator[str]:
        if self.schedule.dynamic_sampling and self.late_rewards.on:
            yield (
                "schedule.dynamic_sampling is true but late_rewards.max_age is "
                f"{self.late_rewards.max_age}, and a group is dropped by the rewards with which it "
                "finishes: set dynamic_sampling to false or late_rewards.max_age to 0"
            )
        workflow = self.rollouts.workflow
        if self.judges.when_spent == "leave_out" and workflow is not None:
            yield (
                f"judges.when_spent is 'leave_out' but rollouts.workflow is {workflow!r}, which "
                "makes rewards of its own, from which none can be left out: set it to 'stop'"
            )
        if self.trainer.moe.router_replay and workflow is not None:
            yield (
                f"trainer.moe.router_replay is true but rollouts.workflow is "
                f"{workflow!r}, whose turns do not carry experts: remove it, or "
                "trainer.moe.router_replay to false"
            )
        if self.placement.colocate and self.schedule.max_lag:
            yield (
                f"placement.colocate is true but schedule.max_lag is {self.schedule.max_lag}, and "
                "generators that sleep while the trainer computes cannot sample ahead of it: set "
                "max_lag to 0, or colocate to false"
            )
        on_cpu = not self.placement.gpus("generator")
        if self.placement.colocate and self.generator.engine == "vllm" and on_cpu:
            yield (
                "placement.colocate is true but placement.generator.gpus is 0 and generator.engine "
                "is 'vllm', which gives up its memory on GPUs only: set gpus above 0, engine to "
                "'embedded', or colocate to false"
            )
        tokens, context = self.generator.max_new_tokens, self.policy.max_context
        if tokens >= context:
            yield (
                f"generator.max_new_tokens is {tokens} but policy.max_context is {context}, and "
                "one answer must fit next to the prompt: raise policy.max_context or lower "
                "generator.max_new_tokens"
            )
        if self.trainer.microbatch_tokens < context:
            yield (
                f"trainer.microbatch_tokens is {self.trainer.microbatch_tokens} but "
                f"policy.max_context is {context}, so the longest conversation fits no microbatch: "
                f"raise trainer.microbatch_tokens to {context} or more"
            )

    def _update_problems(self) -> Iterator[str]:
        for key, found, other in (
            ("sdpo.placement", self.sdpo.pulls_weights, "'inline'"),
            ("trainer.backend", self.trainer.backend is not None, "nothing"),
        ):
            if found and self.syncs_adapters:
                yield (
                    f"trainer.lora.sync is 'adapters' but {key} is of a kind that takes whole "
                    f"weights: set it to {other}, or sync to 'merged'"
                )
        reason = self.loss.refuses_turn_advantages
        if isinstance(self.advantage, TURN_ADVANTAGES) and reason:
            yield (
                f"advantage.type is {self.advantage.type!r}, which gives each turn its own "
                f"advantage, but {reason}, or choose an advantage of whole rollouts"
            )
        policy, ranks = self.policy, self.trainer.context_parallel
        whole = policy.heads % ranks == 0 and 0 in (
            policy.kv_heads % ranks,
            ranks % policy.kv_heads,
        )
        if policy.path is None and not whole:
            yield (
                f"trainer.context_parallel is {ranks} but policy.heads is {policy.heads} and "
                f"policy.kv_heads {policy.kv_heads}, which so many ranks cannot divide: set "
                f"policy.heads to a multiple of {ranks}, and policy.kv_heads to a multiple or a "
                "divisor of it"
            )
        updates, groups = self.trainer.updates_per_batch, self.schedule.prompts_per_step
        if updates > groups:
            yield (
                f"trainer.updates_per_batch is {updates} but schedule.prompts_per_step is "
                f"{groups}, and each update trains whole groups: lower it to {groups} or less"
            )
