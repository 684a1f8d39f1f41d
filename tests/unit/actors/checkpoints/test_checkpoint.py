"""A checkpoint: training goes on from it as if nothing had been, and none is ever half there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from step_batches import ALL_ON, batch_of, largest_change
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_mesh.actors.checkpoints.folder import (
    Checkpoint,
    CheckpointDraft,
    CheckpointFailed,
    UnreadableCheckpoint,
    checkpoints_of,
    folder_of,
    newest,
    newest_whole,
    prune,
)
from composer_mesh.actors.checkpoints.manifest import MANIFEST_FILE, damage, written
from composer_mesh.actors.checkpoints.state import (
    SHARDS,
    TRAINING_FILE,
    WEIGHTS,
    CheckpointReader,
    CheckpointWriter,
    TrainingState,
    random_states,
    restore_random_states,
)
from composer_mesh.actors.checkpoints.teacher_average import (
    AVERAGE_FILE,
    WholeTensors,
    read_average,
    write_average,
)
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.optimizer_state import StateOfOtherWeights
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.ranks import CPU, Ranks
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel, blend_from
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.rollouts.batches import StepBatch

TAID = {**ALL_ON, "sdpo": {"alpha": 0.5, "objective": "taid", "placement": "inline"}}
EMA = {
    **ALL_ON,
    "sdpo": {"alpha": 0.5, "teacher": "ema", "ema_rate": 0.3, "placement": "inline"},
}
SCHEDULED = {
    **TAID,
    "trainer": {"lr_schedule": "cosine", "warmup_steps": 2, "lr": 1e-2, "sharding": "none"},
}


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def trained(learner: Learner, batch: StepBatch) -> dict[str, Any]:
    return learner.train(batch, learner.own_teacher_outputs(batch))


def saved(learner: Learner, root: Path, export: bool = True) -> Path:
    """A checkpoint of one rank; returns its folder."""
    draft = CheckpointDraft(root, learner.version)
    learner.copy(export)
    return draft.commit(learner.write(draft.folder, export)).folder


def batches(folder: Path, count: int) -> list[StepBatch]:
    rng, model = random.Random(5), load_model(folder)
    return [replace(batch_of(model, rng, pairs=3), step=step) for step in range(count)]


def kept(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.export().items()}


def put(root: Path, step: int, content: str = "all") -> Path:
    draft = CheckpointDraft(root, step)
    (draft.folder / "weights").write_text(content)
    return draft.commit(written(draft.folder, [draft.folder / "weights"])).folder


@pytest.mark.parametrize("sections", [TAID, EMA, SCHEDULED], ids=["taid", "ema", "schedule"])
def test_training_from_a_checkpoint_makes_the_weights_that_training_on_would_have_made(
    build_config: Any, folder: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Bit for bit: weights, moments, TAID, the average of the teacher and the learning rate."""
    config, steps = build_config(**sections), batches(folder, 4)
    one = Learner(config, folder, Ranks())
    for batch in steps[:2]:
        trained(one, batch)
    checkpoint = saved(one, tmp_path)
    other = Learner(config, folder, Ranks())
    other.restore(checkpoint)
    assert other.version == 2
    for batch in steps[2:]:
        assert trained(other, batch) == trained(one, batch)
    assert largest_change(kept(one), kept(other)) == 0


def test_what_is_trained_after_the_copy_is_not_in_the_checkpoint(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    config, steps = build_config(**EMA), batches(folder, 4)
    one = Learner(config, folder, Ranks())
    trained(one, steps[0])
    draft = CheckpointDraft(tmp_path, 1)
    one.copy()
    for batch in steps[1:]:
        trained(one, batch)
    draft.commit(one.write(draft.folder))
    other = Learner(config, folder, Ranks())
    other.restore(folder_of(tmp_path, 1))
    for batch in steps[1:]:
        trained(other, batch)
    assert largest_change(kept(one), kept(other)) == 0


@pytest.mark.parametrize("lost", ["optimizer_state", "taid"])
def test_without_a_part_of_the_state_training_would_go_another_way(
    build_config: Any, folder: Path, tmp_path: Path, lost: str
) -> None:
    """So that the tests before this one are about it."""
    config, steps = build_config(**TAID), batches(folder, 4)
    one = Learner(config, folder, Ranks())
    for batch in steps[:3]:
        trained(one, batch)
    checkpoint = saved(one, tmp_path)
    other = Learner(config, folder, Ranks())
    other.restore(checkpoint)
    if lost == "optimizer_state":
        other.step._update._optimizers[0].state.clear()
    else:
        other.step._sdpo.taid.t = 0.9
    for learner in (one, other):
        trained(learner, steps[3])
    assert largest_change(kept(one), kept(other)) > 0


def test_a_checkpoint_is_a_model_folder_of_the_policy(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    one = Learner(build_config(**TAID), folder, Ranks())
    trained(one, batches(folder, 1)[0])
    checkpoint = saved(one, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert largest_change(dict(model.state_dict()), kept(one)) == 0
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template
    assert {"config.json", "generation_config.json"} <= {one.name for one in checkpoint.iterdir()}


def test_a_checkpoint_without_an_export_is_gone_on_from_too(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    one = Learner(build_config(**TAID), folder, Ranks())
    trained(one, batches(folder, 1)[0])
    checkpoint = saved(one, tmp_path, export=False)
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        MANIFEST_FILE,
        SHARDS,
        TRAINING_FILE,
    ]
    other = Learner(build_config(**TAID), folder, Ranks())
    other.restore(checkpoint)
    assert largest_change(kept(one), kept(other)) == 0


def test_random_numbers_of_python_numpy_and_torch_go_on_from_a_checkpoint(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    one = Learner(build_config(**TAID), folder, Ranks())
    checkpoint = saved(one, tmp_path)

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first = drawn()
    assert drawn() != first
    other = Learner(build_config(**TAID), folder, Ranks())
    other.restore(checkpoint)
    assert drawn() == first


def test_random_states_are_json_and_of_a_device_that_is_not_there_nothing() -> None:
    states = json.loads(json.dumps(random_states(CPU)))
    assert states["cuda"] is None
    random.gauss(0, 1)
    first = torch.rand(3)
    restore_random_states(states, CPU)
    assert torch.equal(torch.rand(3), first)


def test_every_byte_of_a_checkpoint_is_in_its_manifest(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    checkpoint = saved(Learner(build_config(**TAID), folder, Ranks()), tmp_path)
    files = json.loads((checkpoint / MANIFEST_FILE).read_text())["files"]
    paths = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*")}
    assert set(files) | {MANIFEST_FILE, SHARDS} == paths
    assert damage(checkpoint) == []


def test_a_rank_takes_no_checkpoint_of_another_policy(
    build_config: Any, build_model: Any, tokenizer: Any, folder: Path, tmp_path: Path
) -> None:
    one = Learner(build_config(**TAID), folder, Ranks())
    trained(one, batches(folder, 1)[0])
    checkpoint = saved(one, tmp_path)
    other = build_model(1)
    other.config.num_hidden_layers += 1
    other.config.layer_types = ["full_attention"] * other.config.num_hidden_layers
    save_policy(type(other)(other.config), tokenizer, tmp_path / "deeper")
    deeper = Learner(build_config(**TAID), tmp_path / "deeper", Ranks())
    with pytest.raises(StateOfOtherWeights, match=r"layers\..* is only in the model"):
        deeper.restore(checkpoint)


def test_a_write_that_fails_says_where_and_why(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    one = Learner(build_config(**TAID), folder, Ranks())
    one.copy()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointFailed, match=r"file could not be written .*free space for it"):
        one.write(tmp_path / "file")


def test_a_second_checkpoint_is_copied_where_torch_closes_its_stager(tmp_path: Path) -> None:
    writer, weight = CheckpointWriter(Ranks(), None), torch.zeros(3)

    def copy(step: int) -> None:
        state = {WEIGHTS + "a": weight.fill_(step)}
        writer.copy(TrainingState(step, state, {}, [random_states(CPU)]))
        writer._stager.close()  # as torch 2.11 and 2.12 do in each copy

    copy(1)
    with pytest.raises(KeyError):
        copy(2)
    writer.reuses_stager = False
    copy(3)
    writer.write(tmp_path, export=False)
    found = torch.zeros(3)
    CheckpointReader(tmp_path).of(WEIGHTS).read({"a": found})
    assert found.tolist() == [3.0] * 3


def test_the_average_of_an_inline_teacher_goes_on_from_where_it_was(build_model: Any) -> None:
    config = SdpoConfig(alpha=0.5, teacher="ema", ema_rate=0.3, placement="inline")
    trainer = build_model(1)
    teacher = TeacherModel(trainer, config, 4096, follows=True)
    trainer.load_state_dict(build_model(2).state_dict())
    teacher.absorb(1, blend_from(trainer))
    again = TeacherModel(build_model(1), config, 4096, follows=True)
    again.restore(1, WholeTensors(teacher.average()))
    for one in (teacher, again):
        one.absorb(2, blend_from(trainer))
    assert again.version == 2
    assert largest_change(teacher.average(), again.average()) == 0


def test_an_average_outside_the_trainer_is_a_file_of_the_checkpoint(
    build_model: Any, tmp_path: Path
) -> None:
    config = SdpoConfig(alpha=0.5, teacher="ema", ema_rate=0.3)
    average = {n: one.detach() for n, one in build_model(2).named_parameters()}
    files = write_average(tmp_path, average)
    assert [one.path for one in files] == [AVERAGE_FILE]
    again = TeacherModel(build_model(1), config, 4096)
    again.restore(7, read_average(tmp_path / AVERAGE_FILE))
    assert again.version == 7
    assert largest_change(average, again.average()) == 0
    (tmp_path / AVERAGE_FILE).write_bytes(b"torn")
    with pytest.raises(UnreadableCheckpoint, match=f"{tmp_path} cannot be read"):
        read_average(tmp_path / AVERAGE_FILE)


def test_what_a_teacher_is_writing_is_no_file_of_the_trainer(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    """It may be gone at any moment: safetensors renames what it has written."""
    learner = Learner(build_config(), folder, Ranks())
    draft = CheckpointDraft(tmp_path, 0)
    learner.copy()
    writing = (draft.folder / AVERAGE_FILE).with_name(".tmpabc")
    writing.parent.mkdir()
    writing.write_bytes(b"half")
    files = [one.path for one in learner.write(draft.folder)]
    assert TRAINING_FILE in files
    assert not [path for path in files if path.startswith("teacher")]


def test_an_average_takes_a_version_in_once_however_often_it_is_pulled(build_model: Any) -> None:
    config = SdpoConfig(alpha=0.5, teacher="ema", ema_rate=0.3)
    teacher = TeacherModel(build_model(1), config, 4096)
    teacher.absorb(1, blend_from(build_model(2)))
    once = {name: value.clone() for name, value in teacher.average().items()}
    teacher.absorb(1, blend_from(build_model(2)))
    assert largest_change(once, teacher.average()) == 0


def test_a_draft_is_no_checkpoint_before_all_of_it_is_written(tmp_path: Path) -> None:
    draft = CheckpointDraft(tmp_path, 3)
    (draft.folder / "weights").write_text("all")
    assert newest(tmp_path) is None
    draft.commit(written(draft.folder, [draft.folder / "weights"]))
    assert newest(tmp_path) == Checkpoint(3, folder_of(tmp_path, 3))


def test_a_discarded_draft_leaves_what_was_there_before(tmp_path: Path) -> None:
    put(tmp_path, 2)
    draft = CheckpointDraft(tmp_path, 2)
    (draft.folder / "weights").write_text("half")
    draft.discard()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert (folder_of(tmp_path, 2) / "weights").read_text() == "all"


def test_the_next_writer_removes_the_draft_of_a_killed_one(tmp_path: Path) -> None:
    left = CheckpointDraft(tmp_path, 7).folder
    (left / MANIFEST_FILE).write_text("{}")  # killed right before the rename
    assert newest(tmp_path) is None
    put(tmp_path, 8)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-8"]


def test_a_checkpoint_may_be_written_again(tmp_path: Path) -> None:
    put(tmp_path, 4, "old")
    put(tmp_path, 4, "new")
    assert (folder_of(tmp_path, 4) / "weights").read_text() == "new"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    former = tmp_path / "checkpoints" / ".step-4.former"
    put(tmp_path, 4, "old").rename(former)
    assert newest(tmp_path) == Checkpoint(4, former)
    put(tmp_path, 8)
    assert [one.step for one in checkpoints_of(tmp_path)] == [4, 8]
    put(tmp_path, 4, "new")
    assert [one.folder for one in checkpoints_of(tmp_path)] == [
        folder_of(tmp_path, 4),
        folder_of(tmp_path, 8),
    ]


def test_the_newest_are_kept_by_number_and_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        put(tmp_path, step)
    (tmp_path / "checkpoints" / "step-1").mkdir()
    prune(tmp_path, keep=2)
    assert [checkpoint.step for checkpoint in checkpoints_of(tmp_path)] == [10, 100]
    assert (tmp_path / "checkpoints" / "step-1").is_dir()


def test_multiples_are_kept_for_good(tmp_path: Path) -> None:
    for step in range(1, 8):
        put(tmp_path, step)
    prune(tmp_path, keep=1, every=3)
    assert [checkpoint.step for checkpoint in checkpoints_of(tmp_path)] == [3, 6, 7]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hurt", "name", "told"),
    [
        (cut, "weights", "weights has 2 bytes but 3 were written"),
        (flip, "weights", "weights is not as it was written: CRC-32"),
        (Path.unlink, "weights", "weights is missing"),
        (cut, MANIFEST_FILE, ""),
        (flip, MANIFEST_FILE, "manifest.json cannot be read"),
    ],
)
def test_damage_is_found_set_aside_and_the_checkpoint_before_is_taken(
    tmp_path: Path, hurt: Callable[[Path], None], name: str, told: str
) -> None:
    put(tmp_path, 4)
    hurt(put(tmp_path, 8) / name)
    found, aside = newest_whole(tmp_path)
    if not told:  # the end of the last line
        assert (found, aside) == (Checkpoint(8, folder_of(tmp_path, 8)), [])
        return
    assert found == Checkpoint(4, folder_of(tmp_path, 4))
    ((moved),) = aside
    assert moved.moved_to == tmp_path / "quarantine" / "step-8"
    assert moved.moved_to.is_dir()
    assert moved.damage[0].startswith(told)
    assert [one.step for one in checkpoints_of(tmp_path)] == [4]


def test_a_run_without_a_whole_checkpoint_has_none_and_loses_no_damaged_one(tmp_path: Path) -> None:
    for _ in range(2):
        cut(put(tmp_path, 4) / "weights")
        assert newest_whole(tmp_path)[0] is None
    assert sorted(path.name for path in (tmp_path / "quarantine").iterdir()) == [
        "step-4",
        "step-4.1",
    ]
