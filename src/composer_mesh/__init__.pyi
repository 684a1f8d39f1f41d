"""The public names, each once, with its module: read by the package itself and by type checkers."""

from . import losses as losses
from .actors.models.backend import (
    BackendContext as BackendContext,
    TorchBackend as TorchBackend,
    TrainerBackend as TrainerBackend,
)
from .actors.panel_actors import TeacherReplayActor as TeacherReplayActor
from .channels.port import (
    Channel as Channel,
    ChannelRows as ChannelRows,
)
from .configs.base import Section as Section
from .configs.errors import ConfigError as ConfigError
from .configs.load import load_config as load_config
from .configs.schema import Config as Config
from .configs.sdpo import SdpoConfig as SdpoConfig
from .losses.custom_function import (
    AdvantageInputs as AdvantageInputs,
    AdvantageOutputs as AdvantageOutputs,
    LossInputs as LossInputs,
    LossOutputs as LossOutputs,
    loss_needs as loss_needs,
)
from .losses.distillation import sdpo_loss as sdpo_loss
from .losses.fused import (
    linear_distillation as linear_distillation,
    linear_logprobs as linear_logprobs,
)
from .losses.policy import (
    grpo_loss as grpo_loss,
    token_logprobs as token_logprobs,
)
from .mesh.actor import MeshActor as MeshActor
from .mesh.heartbeat import HeartbeatRules as HeartbeatRules
from .mesh.progress import made_progress as made_progress
from .mesh.weights.choice import Transport as Transport
from .mesh.weights.manifest import WeightsHandle as WeightsHandle
from .mesh.weights.publisher import WeightPublisher as WeightPublisher
from .mesh.weights.receiver import WeightReceiver as WeightReceiver
from .plugins.frameworks import (
    composer_replication as composer_replication,
    prime_rl as prime_rl,
)
from .plugins.frameworks.areal_training import (
    ArealChannels as ArealChannels,
    areal_step as areal_step,
)
from .plugins.frameworks.data_juicer import write_recipes as write_recipes
from .plugins.frameworks.harness import compose_loss as compose_loss
from .plugins.frameworks.trl.async_grpo import MeshRollouts as MeshRollouts
from .plugins.frameworks.trl.environments import (
    TaskEnvironments as TaskEnvironments,
    environment_rows as environment_rows,
)
from .plugins.frameworks.trl.pairs import (
    StoredPairs as StoredPairs,
    TeacherPairs as TeacherPairs,
    preference_dataset as preference_dataset,
)
from .plugins.frameworks.trl.rollouts import (
    TaskRollouts as TaskRollouts,
    episode_reward as episode_reward,
    episode_rows as episode_rows,
)
from .plugins.frameworks.trl.trainer import (
    ComposerGRPOTrainer as ComposerGRPOTrainer,
    PairLoss as PairLoss,
)
from .plugins.frameworks.verl.agent_loop import verl_episode_rows as verl_episode_rows
from .plugins.frameworks.verl.losses import VerlChannels as VerlChannels
from .plugins.frameworks.verl.steps import (
    verl_pair_step as verl_pair_step,
    verl_rows as verl_rows,
    verl_step as verl_step,
)
from .plugins.openenv.trl_environment import environment_factory as environment_factory
from .rollouts.agent_messages import UnusableMessages as UnusableMessages
from .rollouts.batches import ChannelSample as ChannelSample
from .rollouts.pairs import (
    FrozenState as FrozenState,
    TeacherAnswer as TeacherAnswer,
    TeacherFailure as TeacherFailure,
)
from .rollouts.tasks import (
    Episode as Episode,
    Outcome as Outcome,
)
from .rollouts.traces import (
    ErrorSite as ErrorSite,
    Message as Message,
)
from .services.commands.parser import Command as Command
from .services.offline.api import (
    chat_state as chat_state,
    extract_dpo_pairs as extract_dpo_pairs,
    frozen_state as frozen_state,
    replay_and_normalize_trace as replay_and_normalize_trace,
    replay_and_normalize_trace_sync as replay_and_normalize_trace_sync,
    replay_trace as replay_trace,
)
from .services.offline.options import ReplayRefused as ReplayRefused
from .services.offline.teacher_pool import (
    TeacherPool as TeacherPool,
    teacher_settings as teacher_settings,
)
from .services.pool.replicas import RestartRules as RestartRules
from .services.run_handle import (
    Run as Run,
    RunFailed as RunFailed,
    evaluate as evaluate,
    sft as sft,
    train as train,
)
from .services.store.reading import RunReader as RunReader
from .services.store.rows import Where as Where
from .services.trackers.port import (
    TrackedRun as TrackedRun,
    TrackedStep as TrackedStep,
    Tracker as Tracker,
)
from .tasks.errors import (
    JudgeFailed as JudgeFailed,
    JudgesSpent as JudgesSpent,
    ToolError as ToolError,
)
from .tasks.judges import (
    Judge as Judge,
    JudgeQuestion as JudgeQuestion,
    JudgeReply as JudgeReply,
    Judgement as Judgement,
    quoted as quoted,
)
from .tasks.playing import SyncSession as SyncSession
from .tasks.reward import (
    Transcript as Transcript,
    group_reward as group_reward,
    reward as reward,
    turn_reward as turn_reward,
)
from .tasks.rows import (
    Row as Row,
    read_rows as read_rows,
)
from .tasks.session import (
    Reply as Reply,
    Session as Session,
)
from .tasks.task import (
    Task as Task,
    TaskSettings as TaskSettings,
)
from .tasks.tool import tool as tool
from .tasks.workflow import (
    Agent as Agent,
    AgentWorkflow as AgentWorkflow,
    CommandAgent as CommandAgent,
    ContextFull as ContextFull,
    Conversation as Conversation,
    Engine as Engine,
    FunctionAgent as FunctionAgent,
    Generated as Generated,
    Trajectory as Trajectory,
    Workflow as Workflow,
)
from .services import service as service

__all__: list[str]
