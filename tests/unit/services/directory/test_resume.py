"""Which run directories may be gone on with: theirs, unfinished, and with a config that fits."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.resume import recorded_date, refuse_unfit, with_chat_date


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config(run={"name": "unit", "seed": 3, "steps": 6})


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    (tmp_path / "config.toml").write_text(dump_toml(config))
    (tmp_path / "run.sqlite").touch()
    return tmp_path


def measured(run: Path, step: int) -> None:
    line = {"step": step, "success": 0.5, "episodes": 4}
    (run / "evaluations.jsonl").write_text(json.dumps(line) + "\n")


def test_the_same_config_goes_on_without_a_change(run: Path, config: Config) -> None:
    measured(run, 3)
    assert refuse_unfit(run, config) == []


def test_unsafe_changes_are_refused_with_values_reasons_and_the_repair(
    run: Path, build_config: Any
) -> None:
    other = build_config(
        run={"name": "unit", "seed": 4, "steps": 6}, schedule={"prompts_per_step": 3}
    )
    with pytest.raises(RunDirectoryError) as refused:
        refuse_unfit(run, other)
    told = str(refused.value)
    assert "run.seed: 3 -> 4 (episodes and samples would be others)" in told
    assert "schedule.prompts_per_step: 2 -> 3 (groups are counted by it)" in told
    assert f"give {run / 'config.toml'} as the config" in told
    assert "set policy.path to a checkpoint" in told


def test_one_unsafe_change_is_refused_beside_safe_ones_which_are_not_named(
    run: Path, build_config: Any
) -> None:
    other = build_config(run={"name": "unit", "seed": 4, "steps": 6, "deadline_s": 7.0})
    with pytest.raises(RunDirectoryError) as refused:
        refuse_unfit(run, other)
    assert "run.seed" in str(refused.value)
    assert "run.deadline_s" not in str(refused.value)


def test_safe_changes_are_told(run: Path, build_config: Any) -> None:
    other = build_config(
        run={"name": "unit", "seed": 3, "steps": 8}, logprob_mismatch={"alarm_mean": 0.7}
    )
    changes = refuse_unfit(run, other)
    assert [change.key for change in changes] == ["run.steps", "logprob_mismatch.alarm_mean"]


def test_a_directory_without_a_run_is_refused(tmp_path: Path, config: Config) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        refuse_unfit(tmp_path, config)


def test_a_run_that_came_to_its_end_is_refused_unless_it_gets_more_steps(
    run: Path, config: Config, build_config: Any
) -> None:
    measured(run, 6)
    with pytest.raises(RunDirectoryError, match=r"has trained all its 6 steps: raise run\.steps"):
        refuse_unfit(run, config)
    longer = build_config(run={"name": "unit", "seed": 3, "steps": 7})
    assert [change.key for change in refuse_unfit(run, longer)] == ["run.steps"]


def test_a_run_cannot_get_fewer_steps_than_it_has_trained(run: Path, build_config: Any) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    shorter = build_config(run={"name": "unit", "seed": 3, "steps": 2})
    with pytest.raises(RunDirectoryError, match=r"trained 3 steps but run\.steps is 2: raise"):
        refuse_unfit(run, shorter)


def test_a_run_without_its_store_is_refused_with_the_repair_and_left_as_it_is(
    run: Path, config: Config
) -> None:
    (run / "run.sqlite").unlink()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(
        RunDirectoryError, match=r"no run\.sqlite.* policy\.path set to a checkpoint"
    ):
        refuse_unfit(run, config)
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_run_that_was_stopped_before_it_wrote_anything_goes_on(run: Path, config: Config) -> None:
    (run / "run.sqlite").unlink()
    assert refuse_unfit(run, config) == []


def test_a_resume_has_the_date_that_its_run_recorded_and_another_one_is_refused(
    tmp_path: Path, build_config: Any
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def made(**policy: Any) -> Config:
        return build_config(policy={"path": str(tmp_path / "model"), **policy})

    begun = with_chat_date(made(), recorded_date(tmp_path))
    assert date.fromisoformat(begun.policy.chat_date or "") <= date.today()
    earlier = made(chat_date="2001-01-31")
    assert with_chat_date(earlier, "2001-02-01") == earlier
    (tmp_path / "config.toml").write_text(dump_toml(earlier))
    (tmp_path / "run.sqlite").touch()
    assert refuse_unfit(tmp_path, made()) == []
    assert with_chat_date(made(), recorded_date(tmp_path)) == earlier
    with pytest.raises(RunDirectoryError, match=r"policy\.chat_date: .*01-31.* -> .*02-01"):
        refuse_unfit(tmp_path, made(chat_date="2001-02-01"))


def test_the_built_in_model_has_no_date(config: Config) -> None:
    assert with_chat_date(config, "2001-01-31") == config
