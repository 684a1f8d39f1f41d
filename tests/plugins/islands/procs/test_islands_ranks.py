"""Islands whose trainer has two ranks: their shards meet other islands as complete weights."""

from __future__ import annotations

import json
from pathlib import Path

from live_run import PRESET, SHORT, composer_mesh, launched
from safetensors.numpy import load_file
from shared_runs import after_steps, kill_rank

from composer_mesh.actors.checkpoints.folder import checkpoints_of

STEPS = 6
SETTINGS = SHORT | {
    "run.steps": STEPS,
    "schedule.max_lag": 0,
    "replay.actors": 1,
    "trainer.checkpoint_every": 2,
    "islands.steps_per_round": 2,
}
TWO_RANKS = "\n[trainer]\nranks = 2\n"


def test_an_island_of_two_ranks_and_one_of_one_end_with_the_same_weights(
    tmp_path: Path, policy_cache: Path
) -> None:
    sharded = tmp_path / "sharded.toml"
    sharded.write_text(PRESET.read_text().replace("\n[trainer]\n", TWO_RANKS))
    values = SETTINGS | {"policy.cache_dir": policy_cache, "run.steps": 4}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    where = ["-n", "2", "--store", f"file://{tmp_path}/store", "--output", str(tmp_path / "all")]

    done = composer_mesh("islands", str(PRESET), str(sharded), *sets, *where)

    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert (summary["finished"], summary["round"], summary["lost"]) == (2, 2, 0)
    last = [checkpoints_of(tmp_path / "all" / f"island-{rank}")[-1] for rank in range(2)]
    assert [one.step for one in last] == [4, 4]
    whole, shards = (sorted(one.folder.glob("model*.safetensors")) for one in last)
    assert len(whole) == 1, whole
    one, two = load_file(whole[0]), load_file(shards[0])
    assert list(one) == list(two)
    assert all((one[name] == two[name]).all() for name in one)


def test_two_ranks_of_which_one_dies_in_a_round_train_the_same_steps_again(
    tmp_path: Path, policy_cache: Path
) -> None:
    """The checkpoint of step 2 is one of a round under way, which step 3 merges."""
    settings = SETTINGS | {
        "trainer.ranks": 2,
        "islands.overlap_steps": 1,
        "islands.store": f"file://{tmp_path}/store",
    }
    with launched(tmp_path / "killed", policy_cache, settings) as run:
        after_steps(run, 3)
        kill_rank(run, "trainer-1")
        assert run.wait() == 0, run.stderr
    (restarted,) = run.events("trainer_restarted")
    assert "to the same losses and gradients" in restarted["detail"]
    steps = run.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["islands/merged"] for step in steps] == [0, 0, 1, 0, 1, 1]
    assert [step["islands/round"] for step in steps] == [0, 0, 1, 1, 2, 3]
