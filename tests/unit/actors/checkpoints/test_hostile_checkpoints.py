"""A stranger's checkpoint: none of its files is unpickled, and what does not fit is refused.

The moving average of teachers in processes of their own: one keeps it, all get it back.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_teachers import FakeTeacher, PublishingRank, Ring, config, weights
from safetensors.torch import load_file, save_file
from step_batches import ALL_ON
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from composer_mesh.actors.checkpoints.folder import (
    Checkpoint,
    CheckpointDraft,
    UnreadableCheckpoint,
    newest_whole,
)
from composer_mesh.actors.checkpoints.manifest import MANIFEST_FILE, damage
from composer_mesh.actors.checkpoints.state import (
    SHARDS,
    TRAINING_FILE,
    WEIGHTS,
    CheckpointReader,
    TensorsOnly,
    without_ranks,
)
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.training.checkpoint_writes import AverageLost
from composer_mesh.services.training.step import RestoredTeachers

_watchers: list[list[str]] = []


def _hook(event: str, values: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        for names in _watchers:
            names.append(".".join(map(str, values[:2])))


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect the names that pickles ask for."""
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


class Attack:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


MODULE = b"torch.distributed.checkpoint.metadata"


CLASS_CHANGED = (  # BUILD sets an attribute of the class itself
    b"\x80\x04\x8c" + bytes([len(MODULE)]) + MODULE + b"\x8c\x08Metadata\x93"
    b"N}\x8c\x07meddled\x88s\x86b."
)


@pytest.fixture
def learner(build_config: Any, build_model: Any, tokenizer: Any, tmp_path: Path) -> Learner:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    config = build_config(**{**ALL_ON, "sdpo": {"alpha": 0.5, "placement": "inline"}})
    return Learner(config, tmp_path / "policy", Ranks())


@pytest.fixture
def checkpoint(learner: Learner, tmp_path: Path) -> Path:
    draft = CheckpointDraft(tmp_path, 0)
    learner.copy(export=False)
    return draft.commit(learner.write(draft.folder, export=False)).folder


def shard(checkpoint: Path) -> Path:
    (found,) = (checkpoint / SHARDS).iterdir()
    return found


def as_before(checkpoint: Path, marker: Path) -> None:
    """Add what a version before this one would have opened: each weight is a pickled value."""
    without_ranks()
    shards = checkpoint / SHARDS
    names = list(load_file(shard(checkpoint)))
    built = marker.with_name("built")
    dcp.save({"one": Attack(marker)}, storage_writer=dcp.FileSystemWriter(built), no_dist=True)
    found = dcp.FileSystemReader(built).read_metadata()
    shutil.copy(built / "__0_0.distcp", shards)
    (item,) = found.storage_data.values()
    found.state_dict_metadata = {name: BytesStorageMetadata() for name in names}
    index = next(iter(found.storage_data))
    found.storage_data = {type(index)(name): item for name in names}
    (shards / ".metadata").write_bytes(pickle.dumps(found))


def test_neither_writing_nor_reading_a_checkpoint_unpickles_anything(
    learner: Learner, tmp_path: Path
) -> None:
    with watched() as names:
        draft = CheckpointDraft(tmp_path, 0)
        learner.copy()
        checkpoint = draft.commit(learner.write(draft.folder)).folder
        learner.restore(checkpoint)
    assert names == []
    kinds = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".jinja"}


def test_metadata_that_is_swapped_between_two_reads_runs_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "attacked"
    reader = CheckpointReader(checkpoint)
    as_before(checkpoint, marker)
    tensors = {name: torch.zeros(shape) for name, shape in reader.of(WEIGHTS).shapes().items()}
    with watched() as names:
        reader.of(WEIGHTS).read(tensors)
        CheckpointReader(checkpoint).of(WEIGHTS).read(tensors)
    assert (names, marker.exists()) == ([], False)
    assert any(tensor.abs().sum() for tensor in tensors.values())


@pytest.mark.parametrize("way", ["restore", "verify"])
def test_metadata_that_changes_classes_is_never_opened(
    learner: Learner, checkpoint: Path, tmp_path: Path, way: str
) -> None:
    shards = checkpoint / SHARDS
    (shards / ".metadata").write_bytes(CLASS_CHANGED)
    with watched() as names:
        if way == "verify":
            assert damage(checkpoint) == []
            assert newest_whole(tmp_path)[0] == Checkpoint(0, checkpoint)
        else:
            learner.restore(checkpoint)
    assert names == []
    assert not hasattr(Metadata, "meddled")


def test_a_shard_that_is_a_pickle_is_refused(
    learner: Learner, checkpoint: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "attacked"
    torch.save(Attack(marker), shard(checkpoint))
    with watched() as names, pytest.raises(UnreadableCheckpoint, match="SafetensorError"):
        learner.restore(checkpoint)
    assert (names, marker.exists()) == ([], False)


def test_a_shard_that_is_swapped_after_its_header_was_read_runs_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "attacked"
    reader = CheckpointReader(checkpoint)
    tensors = {name: torch.zeros(shape) for name, shape in reader.of(WEIGHTS).shapes().items()}
    torch.save(Attack(marker), shard(checkpoint))
    with watched() as names, pytest.raises(UnreadableCheckpoint, match="SafetensorError"):
        reader.of(WEIGHTS).read(tensors)
    assert (names, marker.exists()) == ([], False)


def test_the_load_planner_refuses_values_that_torch_would_unpickle(tmp_path: Path) -> None:
    without_ranks()
    marker = tmp_path / "attacked"
    dcp.save({"one": Attack(marker)}, checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(BaseException, match="one is not a tensor: a checkpoint holds only tensors"):
        dcp.load({"one": 0}, checkpoint_id=tmp_path / "old", planner=TensorsOnly(), no_dist=True)
    assert not marker.exists()


def test_a_checkpoint_of_another_format_is_set_aside(checkpoint: Path, tmp_path: Path) -> None:
    manifest = checkpoint / MANIFEST_FILE
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": 1}))
    found, (aside,) = newest_whole(tmp_path)
    assert found is None
    assert "format 1 is not" in aside.damage[0]


def resaved(checkpoint: Path, offsets: dict[str, Any]) -> None:
    """Write the shard again, with the tensor of each name at another place."""
    path = shard(checkpoint)
    tensors = load_file(path)
    told = {n: {"saved_offsets": offsets.get(n, [0] * t.dim())} for n, t in tensors.items()}
    save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(told)})


@pytest.mark.parametrize("offsets", [[1, 0], [-1, 0], [10**40, 0], [0.5, 0], "00", [], None])
def test_rows_that_are_nowhere_or_twice_are_refused(
    learner: Learner, checkpoint: Path, offsets: Any
) -> None:
    name = next(n for n, t in load_file(shard(checkpoint)).items() if t.dim() == 2)
    resaved(checkpoint, {name: offsets})
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        learner.restore(checkpoint)


TRAINING: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda content: {**content, "format": 9},
    "no table": lambda content: [content],
    "no version": lambda content: {**content, "version": "seven"},
    "no figures": lambda content: {**content, "figures": 3},
    "empty figures": lambda content: {**content, "figures": {}},
    "taid that is text": lambda content: {**content, "figures": {"trained": [], "taid": "t"}},
    "random states that are none": lambda content: {**content, "rng": [{"python": [1, [2], 3]}]},
    "random states of numbers": lambda content: {**content, "rng": [7]},
}


@pytest.mark.parametrize("case", TRAINING)
def test_a_training_state_that_does_not_fit_is_refused_with_its_place(
    learner: Learner, checkpoint: Path, case: str
) -> None:
    place = checkpoint / TRAINING_FILE
    place.write_text(json.dumps(TRAINING[case](json.loads(place.read_text()))))
    with pytest.raises((UnreadableCheckpoint, ValueError), match=r"cannot be read|is only in"):
        learner.restore(checkpoint)


@pytest.mark.parametrize("name", [TRAINING_FILE, f"{SHARDS}/more.safetensors"])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_not_waited_for(
    learner: Learner, checkpoint: Path, name: str
) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    with pytest.raises(UnreadableCheckpoint, match="is a FIFO and not a regular file"):
        learner.restore(checkpoint)


MANIFESTS: dict[str, tuple[object, str]] = {
    "a device": (
        {"../../../../dev/zero": {"bytes": 0, "crc32": "0"}},
        "is not a file of a checkpoint",
    ),
    "an absolute path": (
        {"/dev/zero": {"bytes": 0, "crc32": "0"}},
        "is not a file of a checkpoint",
    ),
    "a zero byte": ({"a\0b": {"bytes": 0, "crc32": "0"}}, "is not a file of a checkpoint"),
    "no size": ({"a": {"bytes": float("inf"), "crc32": "0"}}, "OverflowError"),
    "a list": (["a"], "AttributeError"),
    "a fifo": ({"fifo": {"bytes": 0, "crc32": "0"}}, "cannot be read"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_names_what_is_no_file_of_a_checkpoint_is_damage(
    tmp_path: Path, case: str
) -> None:
    files, told = MANIFESTS[case]
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({"format": 2, "step": 1, "files": files}))
    (line,) = damage(tmp_path)
    assert told in line


def test_a_manifest_nested_without_end_is_damage(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text("[" * 100_000)
    (line,) = damage(tmp_path)
    assert "manifest.json cannot be read" in line


@pytest.mark.parametrize("kind", [TRAINING_FILE, "shard", "gone"])
def test_a_checkpoint_that_is_not_what_it_was_is_refused_with_its_place(
    learner: Learner, checkpoint: Path, kind: str
) -> None:
    place = checkpoint / TRAINING_FILE if kind == TRAINING_FILE else shard(checkpoint)
    if kind == "gone":
        place.unlink()
    else:
        place.write_bytes(b"\x80\x04 not what it was")
    match = f"{checkpoint} cannot be read" if kind != "gone" else "is only in the model"
    with pytest.raises((UnreadableCheckpoint, ValueError), match=match):
        learner.restore(checkpoint)


VERSION = 4


async def served(build_config: Any, replicas: int = 2) -> tuple[Ring, RestoredTeachers]:
    """Teachers that have followed the trainer to a version."""
    ring = Ring(config(build_config, replicas=replicas, teacher="ema"), ranks=[1])
    await ring.begin()
    await ring.sdpo.pull(weights(VERSION))
    ring.log.clear()
    ranks = cast(list[SpawnedActor], [PublishingRank("trainer.2", VERSION - 2)])
    return ring, RestoredTeachers(lambda: ranks, ring.sdpo, 5.0)


async def test_one_teacher_keeps_the_average_and_the_same_one_writes_it(build_config: Any) -> None:
    ring, teachers = await served(build_config)
    await teachers.keep(VERSION)
    (file,) = await teachers.write(Path("draft"))
    assert file.path == AVERAGE_FILE
    assert ring.log == [("keep", "sdpo_teacher-0", VERSION), ("write", "sdpo_teacher-0")]


async def test_a_teacher_that_is_not_where_the_trainer_is_keeps_nothing(build_config: Any) -> None:
    ring, teachers = await served(build_config)
    ring.host.started[0].version = VERSION - 1
    await teachers.keep(VERSION)
    await teachers.write(Path("draft"))
    assert ring.of("write") == [("write", "sdpo_teacher-1")]
    with pytest.raises(AverageLost, match="sdpo_teacher-1 is at version 4 but the trainer at 5"):
        await teachers.keep(VERSION + 1)
    assert await teachers.write(Path("draft")) == []


async def test_without_a_living_teacher_there_is_nothing_to_keep(build_config: Any) -> None:
    ring, teachers = await served(build_config, replicas=1)
    ring.host.started[0].die()
    with pytest.raises(AverageLost, match="no SDPO teacher is alive"):
        await teachers.keep(VERSION)


async def test_a_teacher_that_dies_while_it_writes_loses_the_average(build_config: Any) -> None:
    ring, teachers = await served(build_config)
    ring.host.started[0].block("write")
    await teachers.keep(VERSION)
    writing = asyncio.create_task(teachers.write(Path("draft")))
    await ring.settle()
    ring.host.started[0].die()
    with pytest.raises(AverageLost, match="sdpo_teacher-0 died"):
        await writing


async def test_every_teacher_gets_the_average_of_the_checkpoint(
    build_config: Any, tmp_path: Path
) -> None:
    ring, teachers = await served(build_config)
    assert not await teachers.restore(tmp_path, 2)
    assert ring.of("restore") == []
    (tmp_path / AVERAGE_FILE).parent.mkdir()
    (tmp_path / AVERAGE_FILE).touch()
    assert await teachers.restore(tmp_path, 2)
    both = [("restore", f"sdpo_teacher-{n}", 2, tmp_path / AVERAGE_FILE) for n in (0, 1)]
    assert ring.of("restore") == both


async def test_a_run_without_a_checkpoint_goes_back_to_the_initial_policy(
    build_config: Any,
) -> None:
    ring, teachers = await served(build_config, replicas=1)
    assert await teachers.restore(None, 0)
    assert ring.of("restore") == [("restore", "sdpo_teacher", 0, None)]


async def test_a_teacher_that_died_with_the_trainer_is_replaced_before_the_average_is_restored(
    build_config: Any,
) -> None:
    ring, teachers = await served(build_config, replicas=1)
    trainer = PublishingRank("trainer", VERSION)
    await ring.sdpo.pull(weights(VERSION), cast(SpawnedActor, trainer))
    trainer.die()
    ring.host.started[0].die()
    assert await teachers.restore(None, 0)
    assert ring.log[-1] == ("restore", "sdpo_teacher", 0, None)
    assert ring.host.started[1].version == 0


@pytest.mark.parametrize("how", ["dies", "fails"])
async def test_all_teachers_restore_the_average_again_after_one_is_replaced(
    build_config: Any, how: str
) -> None:
    ring, teachers = await served(build_config)
    first, second = ring.host.started
    gate = first.block("restore")
    restoring = asyncio.create_task(teachers.restore(None, 0))
    await ring.settle()
    if how == "dies":
        first.die()
    else:
        first.error = MemoryError()
        gate.set()
    assert await restoring
    names = [entry[1] for entry in ring.of("restore")]
    assert names == ["sdpo_teacher-1", "sdpo_teacher-0", "sdpo_teacher-1"]
    assert (ring.host.started[2].version, second.version) == (0, 0)


async def test_an_average_that_no_teacher_is_left_for_ends_the_run_with_the_reason(
    build_config: Any,
) -> None:
    ring, teachers = await served(build_config, replicas=1)
    ring.host.prepare = FakeTeacher.die
    ring.host.started[0].die()
    with pytest.raises(ActorDied, match="sdpo_teacher died"):
        await teachers.restore(None, 0)
