"""A teacher that is another model: of another size and padding, with the policy's tokenizer.

Losses by signal: hidden and full agree, topk comes to them as k grows, sampled is its own.
"""

from __future__ import annotations

import random
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_host import InProcessHost
from repetition import repeated
from step_batches import (
    NARROW,
    GivenStates,
    Make,
    assert_gradients_are,
    batch_of,
    flat,
    gradients_of,
    largest_change,
    nearby,
    weights_of,
)
from torch import Tensor

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.sdpo_channel import SdpoChannel, StudentRows
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models import policy
from composer_mesh.actors.models.hidden_states import SelectedRows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor
from composer_mesh.actors.teacher_outputs.messages import TeacherHead, TeacherOutput
from composer_mesh.actors.teacher_outputs.sources import InlineSource, TeacherOutputsLost
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel, blend_from, load_teacher
from composer_mesh.losses.distillation import generalized_jsd
from composer_mesh.mesh.weights.manifest import WeightManifest, WeightsHandle
from composer_mesh.planning.model_folder import UnfitModelFolder
from composer_mesh.rollouts.batches import StepBatch

OUTPUTS = ["hidden", "full", "topk", "sampled"]


PADDINGS = [-3, 0, 5]


"""Rows that the teacher's head has more than the student's."""


@pytest.fixture
def student(build_model: Any) -> Any:
    """A student whose own head has a few rows that no token has."""
    model = build_model(1)
    model.resize_token_embeddings(len(model.lm_head.weight) + 4)
    return model


@pytest.fixture
def bigger(build_config: Any, tokenizer: Any, student: Any) -> Any:
    """A wider teacher, by the rows that its head has more than the student's."""

    def build(padding: int) -> Any:
        sizes = {"hidden_size": 48, "layers": 3, "heads": 3, "kv_heads": 3}
        config = build_config(policy=sizes).policy
        model = policy.build_model(config, tokenizer, seed=5)
        model.resize_token_embeddings(len(student.lm_head.weight) + padding)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=0.3, generator=generator)
        return model.eval()

    return build


def taught(build_config: Any, folder: Path, **settings: Any) -> Any:
    sdpo = {"alpha": 0.5, "teacher": "model", "teacher_model": {"path": folder}, **settings}
    return build_config(sdpo=sdpo)


@pytest.fixture
def folders(student: Any, bigger: Any, tokenizer: Any, tmp_path: Path) -> tuple[Path, Path]:
    """The folders of the policy and of the teacher."""
    save_policy(student, tokenizer, tmp_path / "policy")
    save_policy(bigger(5), tokenizer, tmp_path / "teacher")
    return tmp_path / "policy", tmp_path / "teacher"


def test_a_head_with_more_rows_gives_their_probability_to_the_others() -> None:
    states, weight, bias = torch.randn(4, 6), torch.randn(9, 6), torch.randn(9)
    for one in (bias, None):
        whole = states @ weight.T + (0 if one is None else one)
        head = TeacherHead(weight, one).fitted(7)
        found = states @ head.weight.T + (0 if head.bias is None else head.bias)
        wanted = whole.softmax(-1)[:, :7]
        torch.testing.assert_close(found.softmax(-1), wanted / wanted.sum(-1, keepdim=True))


def test_a_head_with_fewer_rows_gives_the_missing_ones_no_probability() -> None:
    states, weight, bias = torch.randn(4, 6), torch.randn(9, 6), torch.randn(9)
    for one in (bias, None):
        whole = states @ weight.T + (0 if one is None else one)
        head = TeacherHead(weight, one).fitted(12)
        assert head.bias is not None
        found = (states @ head.weight.T + head.bias).softmax(-1)
        torch.testing.assert_close(found[:, :9], whole.softmax(-1))
        assert found[:, 9:].eq(0).all()


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_loss_is_that_to_the_other_models_distribution_over_the_students_ids(
    build_config: Any, student: Any, bigger: Any, tmp_path: Path, padding: int
) -> None:
    config = taught(build_config, tmp_path)
    model, rows = bigger(padding), len(student.lm_head.weight)
    views = batch_of(student, random.Random(1), samples=4).views
    teacher = TeacherModel(model, config.sdpo, 4096, vocabulary=rows)
    output = TeacherOutput(teacher.teacher_output(views), teacher.head())
    states = torch.randn(sum(len(view.targets) for view in views), 32, requires_grad=True)
    targets = torch.tensor([target for view in views for target in view.targets])
    own = StudentRows(LanguageModel(student), SelectedRows.all(states), targets, 1.0)
    found = SdpoChannel(config.sdpo, config.run.steps).loss(own, output, normalizer=len(targets))
    with torch.no_grad():
        other = LanguageModel(model)
        kept = other.weight[:rows]
        logits = teacher.states(views) @ kept.T
        logits = torch.cat([logits, logits.new_full((len(logits), rows - len(kept)), -200)], -1)
    mask = torch.ones(len(targets), dtype=torch.bool)
    scores = states @ student.lm_head.weight.T
    wanted = generalized_jsd(scores, logits, mask, jsd_beta=0.5, normalizer=len(targets))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(found, states)
    (expected,) = torch.autograd.grad(wanted, states)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("teacher_output", OUTPUTS)
def test_every_output_of_another_model_trains_the_student_with_a_finite_loss(
    build_config: Any, student: Any, bigger: Any, tmp_path: Path, teacher_output: str, padding: int
) -> None:
    settings = {"teacher_output": teacher_output, "top_k": 500, "top_k_choice": "student"}
    config = taught(build_config, tmp_path, **settings)
    rows = len(student.lm_head.weight)
    views = batch_of(student, random.Random(1), samples=4).views
    teacher = TeacherModel(bigger(padding), config.sdpo, 4096, vocabulary=rows)
    states = torch.randn(sum(len(view.targets) for view in views), 32, requires_grad=True)
    targets = torch.tensor([target for view in views for target in view.targets])
    own = StudentRows(LanguageModel(student), SelectedRows.all(states), targets, 1.0)
    found = teacher.teacher_output(views, own.top_k(500))
    output = TeacherOutput(found, teacher.head() if teacher_output == "hidden" else None)
    loss = SdpoChannel(config.sdpo, config.run.steps).loss(own, output, normalizer=len(targets))
    loss.backward()
    assert loss.isfinite()
    assert states.grad is not None
    assert states.grad.isfinite().all()
    assert states.grad.abs().sum() > 0


def test_another_model_never_follows_the_trainer(
    build_config: Any, student: Any, bigger: Any, tmp_path: Path
) -> None:
    teacher = TeacherModel(bigger(0), taught(build_config, tmp_path).sdpo, 4096)
    before = {name: one.clone() for name, one in weights_of(teacher.models[0]).items()}
    nearby(student, seed=3)
    teacher.absorb(1, blend_from(student))
    assert teacher.version == 1
    assert all(one.equal(before[name]) for name, one in weights_of(teacher.models[0]).items())
    assert teacher.average() == {}


async def test_a_teacher_process_of_another_model_reads_no_published_weights(
    build_config: Any, folders: tuple[Path, Path]
) -> None:
    teacher = await InProcessHost().spawn("sdpo_teacher", SDPOTeacherActor)
    await teacher.call("load", taught(build_config, folders[1]), folders[0], deadline_s=60)
    nobody = WeightsHandle(3, WeightManifest(()), ())
    assert await teacher.call("pull", nobody, deadline_s=60) == 3
    assert await teacher.call("restore", 5, None, deadline_s=60) == 5


def test_a_teacher_in_the_trainer_is_the_one_in_its_own_process(
    build_config: Any, student: Any, folders: tuple[Path, Path]
) -> None:
    config = taught(build_config, folders[1], placement="inline")
    learner = Learner(config, folders[0], Ranks())
    batch = batch_of(student, random.Random(1), samples=4)
    source = learner.own_teacher_outputs(batch)
    inline = source.take(0, batch.views, lambda: torch.empty(0))
    apart = TeacherModel(
        load_teacher(config.sdpo, folders[0]),
        config.sdpo,
        config.trainer.microbatch_tokens,
        vocabulary=len(student.lm_head.weight),
    )
    torch.testing.assert_close(inline.tensors, apart.teacher_output(batch.views))
    assert inline.head is not None
    torch.testing.assert_close(inline.head.weight, apart.head().weight)
    assert inline.head.weight.shape == (len(student.lm_head.weight), 48)
    metrics = learner.train(batch, source)
    assert metrics["loss/sdpo"] > 0
    assert learner.own_teacher_outputs(batch).figures()["sdpo/teacher_version"] == 1


def test_a_model_with_another_tokenizer_is_refused_where_it_is_loaded(
    build_config: Any, student: Any, folders: tuple[Path, Path], tokenizer: Any
) -> None:
    changed = deepcopy(tokenizer)
    changed.add_tokens(["<other>"])
    save_policy(student, changed, folders[1])
    told = (
        f"^sdpo.teacher_model.path: {re.escape(str(folders[1]))} has another tokenizer, which has "
        f"{len(changed)} tokens and the policy's {len(tokenizer)}, 1 of them different: '<other>' "
        rf"is id {len(tokenizer)} there and no token here: give a teacher"
    )
    config = taught(build_config, folders[1], placement="inline")
    with pytest.raises(UnfitModelFolder, match=told):
        load_teacher(config.sdpo, folders[0])
    with pytest.raises(UnfitModelFolder, match=told):
        Learner(config, folders[0], Ranks())


def test_a_folder_that_cannot_be_loaded_is_named_by_the_teachers_key(
    build_config: Any, folders: tuple[Path, Path]
) -> None:
    (folders[1] / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnfitModelFolder, match=r"^sdpo.teacher_model.path: .* cannot be loaded"):
        load_teacher(taught(build_config, folders[1]).sdpo, folders[0])


ALPHA = 0.5


LOOSE = {"grad_clip": 1e9, "lr": 1e-3}


TEMPERATURE = 1.3


WHOLE = 100_000


"""More entries than the vocabulary has."""


class Trained:
    """A step with an inline teacher of the configured signal: its loss and its gradients."""

    def __init__(self, make: Make, seed: int = 0, trainer: Any = LOOSE, **sdpo: Any) -> None:
        sections = {"alpha": ALPHA, "placement": "inline", **sdpo}
        self.model, self.step = make(2, **NARROW, sdpo=sections, trainer=trainer)
        self.config = self.step._config.sdpo
        self.batch = flat(batch_of(self.model, random.Random(seed)))
        nearby(self.model, seed=1)  # the student has moved on from what the teacher is
        self.metrics = self.step.run(self.batch, self.source(make))
        self.loss: float = self.metrics["loss/sdpo"] or 0.0
        self.gradients = [weights.grad for weights in self.model.parameters()]

    def source(self, make: Make) -> InlineSource:
        budget = self.step._config.trainer.microbatch_tokens
        teacher = TeacherModel(make(2)[0], self.config, budget, follows=True)
        return InlineSource(teacher, self.config, 0)


def distance(one: Trained, two: Trained) -> float:
    """Between gradients, as a share of their size."""
    a = torch.cat([part.flatten() for part in one.gradients if part is not None])
    b = torch.cat([part.flatten() for part in two.gradients if part is not None])
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("teacher", ["live", "ema", "frozen", "trust_region"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.7, "jsd_beta": 0.2},
        {"objective": "taid"},
        {"objective": "entropy_opd"},
    ],
    ids=["jsd", "tempered", "taid", "entropy_opd"],
)
def test_hidden_and_full_have_the_same_loss_and_gradients(
    make: Make, settings: dict[str, Any], teacher: str
) -> None:
    hidden, full = (
        Trained(make, teacher_output=teacher_output, teacher=teacher, **settings)
        for teacher_output in ("hidden", "full")
    )
    assert hidden.loss > 1e-4
    assert hidden.loss == pytest.approx(full.loss, rel=1e-5)
    assert distance(hidden, full) < 1e-5


@pytest.mark.parametrize("choice", ["teacher", "student"])
@pytest.mark.parametrize("beta", repeated([0.5, 0.0, 1.0]))
def test_topk_comes_to_the_exact_loss_as_k_grows(make: Make, choice: str, beta: float) -> None:
    exact = Trained(make, teacher_output="hidden", jsd_beta=beta)
    found = [
        Trained(make, teacher_output="topk", top_k=k, top_k_choice=choice, jsd_beta=beta)
        for k in (1, 16, 128, WHOLE)
    ]
    errors = [abs(one.loss - exact.loss) / exact.loss for one in found]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5
    distances = [distance(one, exact) for one in found]
    assert distances[0] > distances[2] > distances[3]
    assert distances[3] < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_topk_of_the_whole_vocabulary_is_the_full_signal(make: Make, temperature: float) -> None:
    sdpo = {"temperature": temperature, "jsd_beta": 0.5}
    whole = Trained(make, teacher_output="topk", top_k=WHOLE, **sdpo)
    full = Trained(make, teacher_output="full", **sdpo)
    assert whole.loss == pytest.approx(full.loss, rel=1e-5)
    assert distance(whole, full) < 1e-5


def test_a_topk_loss_never_exceeds_the_whole_one(make: Make) -> None:
    """A tail in one bucket can only hide differences."""
    exact = Trained(make, teacher_output="hidden").loss
    for k in (1, 8, 64):
        assert Trained(make, teacher_output="topk", top_k=k).loss <= exact * (1 + 1e-5)


def log_probs(model: Any, ids: list[int], rows: list[int], targets: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, rows]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(targets)[:, None])[:, 0]


def test_sampled_is_reinforce_towards_the_teachers_log_probs(make: Make) -> None:
    found = Trained(make, teacher_output="sampled", temperature=TEMPERATURE)
    student, teacher = nearby(make(2)[0], seed=1), make(2)[0]
    ids = {sample.trace_id: sample.ids for sample in found.batch.samples}
    expected = torch.zeros(())
    for view in found.batch.views:
        own = log_probs(student, ids[view.trace_id], view.student_rows, view.targets)
        others = log_probs(teacher, view.teacher_ids, view.teacher_rows, view.targets)
        expected = expected - ((others - own).detach() * own).sum() / found.batch.sdpo_tokens
    assert found.loss == pytest.approx(expected.item(), rel=1e-4)
    assert_gradients_are(gradients_of(ALPHA * expected, student), found.model)


@pytest.mark.parametrize("teacher_output", ["hidden", "topk", "full", "sampled"])
def test_how_a_step_is_split_changes_no_signals_loss(make: Make, teacher_output: str) -> None:
    one, many = (
        Trained(make, teacher_output=teacher_output, trainer={**LOOSE, "microbatch_tokens": budget})
        for budget in (10_000, 64)
    )
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert_gradients_are([part for part in one.gradients if part is not None], many.model)


class LosesSome:
    """A source that gives up at its second microbatch."""

    def __init__(self, batch: StepBatch, states: Tensor) -> None:
        self._given, self._taken = GivenStates(batch, states), 0

    def take(self, *asked: Any) -> TeacherOutput:
        self._taken += 1
        if self._taken > 1:
            raise TeacherOutputsLost("the teacher died")
        return self._given.take(*asked)


def test_a_step_whose_signals_are_lost_is_the_step_without_the_channel(make: Make) -> None:
    sections = {**NARROW, "trainer": {**LOOSE, "microbatch_tokens": 64}}
    model, step = make(2, **sections, sdpo={"alpha": ALPHA})
    other, plain = make(2, **sections)
    batch = batch_of(model, random.Random(0))
    states = torch.ones(batch.sdpo_tokens, model.config.hidden_size)
    found = step.run(batch, LosesSome(batch, states))
    expected = plain.run(replace(batch, views=[]), None)
    assert (found.pop("sdpo/lost_steps"), found.pop("sdpo/alpha")) == (1, ALPHA)
    assert found["loss/sdpo"] is None
    assert found == expected
    assert largest_change(weights_of(model), weights_of(other)) == 0


class AnotherRankLost(Ranks):
    """This process's view when the signals of another rank did not come."""

    def any(self, flag: bool) -> bool:
        return True


def test_what_another_rank_lost_is_lost_for_all(make: Make) -> None:
    model, plain = make(2, sdpo={"alpha": ALPHA})
    step = OptimizerStep(model, None, plain._config, AnotherRankLost())
    batch = batch_of(model, random.Random(0))
    states = torch.ones(batch.sdpo_tokens, model.config.hidden_size)
    metrics = step.run(batch, GivenStates(batch, states))
    assert metrics["sdpo/lost_steps"] == 1
    assert metrics["loss/sdpo"] is None
