"""What a run's controller is made of, from its config, its store and its living actors.

Only puts parts together; each says itself what it does. When they are made is `assembly`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Task
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.episodes.environments import MeshEnvironments
from composer_mesh.services.episodes.generation import LockstepGeneration, PooledGeneration
from composer_mesh.services.episodes.retries import Retries
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.replay.pair_stream import PairStream
from composer_mesh.services.replay.parts import make_late_rewards, make_pair_stream
from composer_mesh.services.run.looking_back import Past, begun_of, restore_asking, trained_steps
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.run.mesh_ports import MeshReference, MeshTeachers
from composer_mesh.services.schedule.begun import Begun
from composer_mesh.services.schedule.composing import Composer
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.agreement import AgreementWatch
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import HintWriting
from composer_mesh.services.steps.ports import Watcher
from composer_mesh.services.steps.trained_again import Trained
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.training.lasting import LastingTrainer
from composer_mesh.services.training.step import MeshTraining, ReplayTeachers
from composer_mesh.services.training.weight_sync import MeshWeightSync

Event = Callable[..., None]


@dataclass(frozen=True)
class RunParts:
    """The parts of one run, made when its actors are loaded."""

    config: Config
    store: RunStore
    mesh: RunMesh
    task: Task
    chat: ChatFormat
    event: Event

    def trainer(self, checkpoint: Checkpoint | None) -> LastingTrainer:
        """The trainer's ranks, and what outlives them."""
        config, ranks, teachers = self.config, self.mesh.trainers, self.mesh.teachers
        deadline = config.run.deadline_s
        sync = MeshWeightSync(lambda: ranks.all, self.mesh.generators, teachers, deadline)
        follow = ReplayTeachers(lambda: ranks.all, teachers, deadline) if teachers else None
        step = MeshTraining(config, lambda: ranks.all, teachers)
        rest = (self.store.root, self.event, self._trained_steps, checkpoint)
        return LastingTrainer(config, ranks, step, sync, follow, *rest)

    def _trained_steps(self, first: int, until: int) -> list[Trained]:
        composer = self._composer()
        return trained_steps(self.store.reading, self.config, composer, first, until)

    def controller(self, trainer: LastingTrainer, watch: Watcher, past: Past) -> Controller:
        """The controller of a run that has a past, or an empty one.

        Teachers are asked from here on about what they were not asked before.
        """
        composer, stream = self._composer(), self._pair_stream()
        begun = begun_of(past, composer)
        if stream is not None:
            restore_asking(past, stream, self.store.reading, self._first_in_window(begun))
        ports = Ports(
            self.rollouts(past),
            stream,
            trainer,
            trainer,
            self.store,
            watch,
            trainer.save,
            trainer.saved,
            self._hint_writing(),
            AgreementWatch(self.config.agreement, self.event),
        )
        return Controller(self.config, self.task, composer, ports, begun)

    def _first_in_window(self, begun: Begun) -> int:
        steps = begun.steps + (begun.planned is not None)
        return steps * self.config.schedule.prompts_per_step

    def _composer(self) -> Composer:
        advantages = make_advantages(self.config.advantage)
        report = partial(self.event, "late_reward", "")
        late = make_late_rewards(self.config, self.store.reading.rewards, advantages, report)
        return Composer(Batcher(self.config, self.task, self.chat, advantages), late)

    def rollouts(self, past: Past) -> Rollouts:
        """What samples, which knows an earlier process of the run."""
        closed = self.config.schedule.max_lag == 0
        generation: Any = LockstepGeneration if closed else PooledGeneration
        retries = Retries(self.config.supervision, self.store.add_poisoned, self.event)
        retries.know(past.poisoned, past.sizes, self.config.schedule.group_size)
        environments = MeshEnvironments(self.mesh.environments)
        return Rollouts(generation(self.mesh.generators), environments, self.chat, retries)

    def _pair_stream(self) -> PairStream | None:
        mesh, waiting = self.mesh, self.store.reading.waiting_pairs
        if mesh.replay is None:
            return None
        reference: MeshReference | None = None
        if mesh.reference is not None:
            reference = MeshReference(mesh.reference, self.config.run.deadline_s)
        teachers = MeshTeachers(mesh.replay)
        return make_pair_stream(self.config, teachers, reference, self.chat, self.store, waiting)

    def _hint_writing(self) -> HintWriting | None:
        if self.mesh.hints is None:
            return None
        report = partial(self.event, "hint_not_worded", "hint_writer")
        return HintWriting(self.mesh.hints, self.config, self.task, self.chat, report)
