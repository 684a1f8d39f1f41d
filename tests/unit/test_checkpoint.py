"""A checkpoint: training goes on from it as if nothing had been, and none is ever half there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from step_batches import ALL_ON, Make, batch_of, largest_change, taught, weights_of

from composer_mesh.actors.checkpoint import (
    TrainingState,
    UnreadableCheckpoint,
    restore_weights,
)
from composer_mesh.actors.checkpoint_folder import (
    STATE_FILE,
    checkpoints_of,
    folder_of,
    newest,
    prune,
    whole,
)
from composer_mesh.actors.policy import save_policy
from composer_mesh.actors.teaching import TeacherModel, blend_from
from composer_mesh.configs.sdpo import SdpoConfig

TAID = {**ALL_ON, "sdpo": {"alpha": 0.5, "wrapper": "taid"}}


def written(root: Path, step: int) -> Path:
    with whole(folder_of(root, step)) as draft:
        (draft / STATE_FILE).write_text(str(step))
        (draft / "weights").write_text("all")
    return folder_of(root, step)


@pytest.mark.parametrize("sections", [ALL_ON, TAID], ids=["plain", "taid"])
def test_training_from_a_checkpoint_makes_the_weights_that_training_on_would_have_made(
    make: Make, tokenizer: Any, rng: random.Random, tmp_path: Path, sections: dict[str, Any]
) -> None:
    model, step = make(**sections)
    teacher = make(3)[0]
    batches = [batch_of(model, rng, pairs=3) for _ in range(4)]
    for batch in batches[:2]:
        taught(step, teacher, batch)
    save_policy(model, tokenizer, tmp_path)
    TrainingState(2, step.state()).save(tmp_path)
    other, again = make(2, **sections)
    restore_weights(other, tmp_path)
    again.restore(TrainingState.load(tmp_path).step)
    for batch in batches[2:]:
        assert taught(again, teacher, batch) == taught(step, teacher, batch)
    assert largest_change(weights_of(model), weights_of(other)) == 0


def test_without_the_optimizers_state_training_would_go_another_way(
    make: Make, rng: random.Random, tmp_path: Path, tokenizer: Any
) -> None:
    model, step = make(**ALL_ON)
    teacher = make(3)[0]
    batches = [batch_of(model, rng, pairs=3) for _ in range(3)]
    for batch in batches[:2]:
        taught(step, teacher, batch)
    save_policy(model, tokenizer, tmp_path)
    other, again = make(2, **ALL_ON)
    restore_weights(other, tmp_path)
    for one in (step, again):
        taught(one, teacher, batches[2])
    assert largest_change(weights_of(model), weights_of(other)) > 0


def test_the_average_of_an_inline_teacher_goes_on_from_where_it_was(build_model: Any) -> None:
    config = SdpoConfig(alpha=0.5, teacher="ema", teacher_rate=0.3, placement="inline")
    trainer = build_model(1)
    teacher = TeacherModel(trainer, config, 4096, follows=True)
    trainer.load_state_dict(build_model(2).state_dict())
    teacher.absorb(1, blend_from(trainer))
    again = TeacherModel(build_model(1), config, 4096, follows=True)
    again.restore(1, teacher.average())
    for one in (teacher, again):
        one.absorb(2, blend_from(trainer))
    assert again.version == 2
    assert largest_change(teacher.average(), again.average()) == 0


def test_an_average_takes_a_version_in_once_however_often_it_is_pulled(build_model: Any) -> None:
    config = SdpoConfig(alpha=0.5, teacher="ema", teacher_rate=0.3)
    teacher = TeacherModel(build_model(1), config, 4096)
    teacher.absorb(1, blend_from(build_model(2)))
    once = {name: value.clone() for name, value in teacher.average().items()}
    teacher.absorb(1, blend_from(build_model(2)))
    assert largest_change(once, teacher.average()) == 0


def test_a_draft_is_no_checkpoint_before_all_of_it_is_written(tmp_path: Path) -> None:
    with whole(folder_of(tmp_path, 3)) as draft:
        (draft / STATE_FILE).write_text("state")
        assert newest(tmp_path) is None
    found = newest(tmp_path)
    assert found is not None
    assert (found.step, found.folder) == (3, folder_of(tmp_path, 3))


def test_a_write_that_fails_leaves_nothing_and_what_was_there_before(tmp_path: Path) -> None:
    written(tmp_path, 2)

    def fail() -> None:
        with whole(folder_of(tmp_path, 2)) as draft:
            (draft / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert (folder_of(tmp_path, 2) / "weights").read_text() == "all"


def test_the_next_writer_removes_the_draft_of_a_killed_one(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-7.1"
    left.mkdir(parents=True)
    (left / STATE_FILE).write_text("half")
    assert newest(tmp_path) is None
    written(tmp_path, 8)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-8"]


def test_a_checkpoint_may_be_written_again(tmp_path: Path) -> None:
    (written(tmp_path, 4) / "weights").write_text("old")
    written(tmp_path, 4)
    assert (folder_of(tmp_path, 4) / "weights").read_text() == "all"


def test_the_newest_are_kept_by_number_and_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        written(tmp_path, step)
    (tmp_path / "checkpoints" / "step-1").mkdir()  # as an older version saved it: no state
    prune(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints_of(tmp_path)] == [10, 100]
    assert (tmp_path / "checkpoints" / "step-1").is_dir()


@pytest.mark.parametrize("content", [b"", b"not a state", b"PK\x03\x04 cut off"])
def test_a_state_that_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(UnreadableCheckpoint, match=f"{tmp_path} cannot be read"):
        TrainingState.load(tmp_path)


def test_a_state_with_other_fields_is_refused(tmp_path: Path) -> None:
    torch.save({"version": 1}, tmp_path / STATE_FILE)
    with pytest.raises(UnreadableCheckpoint, match="another version"):
        TrainingState.load(tmp_path)
