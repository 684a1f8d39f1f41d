"""The audit of a run that is killed again and again: dropped groups are read from its manifests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stored_runs import group_of, trace_of

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.configs.schema import Config
from composer_mesh.services.steps.step_manifest import StepManifest, manifest_to_json
from composer_mesh.services.store.writing import RunStore

crash: Any = importlib.import_module("crash_audit")

BuildConfig = Callable[..., Config]

DYNAMIC = ScheduleConfig(
    prompts_per_step=1, group_size=2, dynamic_sampling=True, oversampling=2.0, max_lag=1
)


async def stored(root: Path, config: Config, *steps: StepManifest) -> Any:
    """Return the audit of a run of these steps with four groups: rewards of group 1 are equal."""
    with RunStore(root, config) as store:
        for group in range(4):
            store.enter(group, group // 2)
            equal = [trace_of(group, sample, group // 2) for sample in range(2)]
            await store.add_group(
                group, equal if group == 1 else group_of(group, version=group // 2)
            )
        for one in steps:
            await store.plan_step(one.step, one.groups, manifest_to_json(one), [])
    audit = crash.Audit(DYNAMIC)
    audit.look(root, "end")
    return audit


async def test_a_dropped_group_is_neither_skipped_nor_trained(
    tmp_path: Path, build_config: BuildConfig
) -> None:
    refilled = StepManifest(1, (2,), dropped=(1,))
    audit = await stored(tmp_path, build_config(), StepManifest(0, (0,)), refilled)
    assert not audit.skipped
    assert not audit.twice
    assert not audit.notes


async def test_a_group_that_was_neither_trained_nor_dropped_is_skipped(
    tmp_path: Path, build_config: BuildConfig
) -> None:
    audit = await stored(tmp_path, build_config(), StepManifest(0, (0,)), StepManifest(1, (2,)))
    assert audit.skipped == {1}


async def test_a_group_that_one_step_dropped_and_another_trained_is_taken_twice(
    tmp_path: Path, build_config: BuildConfig
) -> None:
    first = StepManifest(0, (0,), dropped=(1,))
    audit = await stored(tmp_path, build_config(), first, StepManifest(1, (2,), dropped=(1,)))
    assert audit.twice == {1}


async def test_a_dropped_group_whose_rewards_differ_is_told(
    tmp_path: Path, build_config: BuildConfig
) -> None:
    audit = await stored(tmp_path, build_config(), StepManifest(0, (1,), dropped=(0,)))
    assert {"step 1 trained group 1, whose rewards are all equal"} < audit.violations
    assert any("dropped group 0, whose rewards differ" in one for one in audit.violations)
