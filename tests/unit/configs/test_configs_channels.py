"""Settings of the channels that contradict each other are refused, with what to change."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from composer_mesh.configs.changes import changes
from composer_mesh.configs.channels import ChannelSchedule
from composer_mesh.configs.sdpo import SdpoConfig

TEACHERS = [{"name": "a", "kind": "builtin"}, {"name": "b", "kind": "builtin"}]
REPLAY: dict[str, Any] = {"beta": 0.3, "ask": 2, "teachers": TEACHERS}
FALLING = {"decay": "linear", "by": "agreement"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sdpo": {"alpha": 1.0, "min_update_share": 0.5, "max_update_share": 0.4}}, "within both"),
        (
            {
                "sdpo": {"alpha": 1.0, "min_update_share": 0.6},
                "replay": {**REPLAY, "min_update_share": 0.4},
            },
            "leaves the policy nothing",
        ),
        ({"sdpo": {"alpha": 1.0, "max_update_share": 0.0}}, "greater than 0"),
        ({"sdpo": {"alpha": 1.0, "min_update_share": 1.0}}, "less than 1"),
        (
            {"sdpo": {"alpha": 1.0, "min_advantage": 0.0, "advantage_sites": 0}},
            "advantage_sites is 0",
        ),
        (
            {"sdpo": {"alpha": 1.0, "advantage_sites": 4, "teacher_output": "topk"}},
            "lacks the log-probs of right actions",
        ),
        ({"sdpo": {"alpha": 1.0, "alpha_schedule": FALLING}}, "no teacher is queried"),
        ({"trainer": {"update_share_every": -1}}, "greater than or equal to 0"),
    ],
)
def test_a_channel_that_cannot_be_so_is_refused(
    build_config: Any, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        build_config(**sections)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"by": "success"}, "never falls"),
        ({"decay": "linear", "start": 0.2}, "which reads neither"),
        ({"decay": "linear", "by": "success", "start": 0.9, "end": 0.9}, "set start below end"),
    ],
)
def test_a_schedule_that_has_no_course_is_refused(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ChannelSchedule.model_validate(schedule)


def test_a_channel_that_is_off_may_keep_its_bounds_as_arms_of_an_ablation_do(
    build_config: Any,
) -> None:
    assert not build_config(sdpo={"alpha": 0.0, "min_update_share": 0.4}).sdpo.on


def test_agreement_may_be_followed_where_teachers_are_asked(build_config: Any) -> None:
    config = build_config(sdpo={"alpha": 1.0, "alpha_schedule": FALLING}, replay=REPLAY)
    assert config.sdpo.alpha_schedule.by == "agreement"


def test_a_run_whose_weights_move_with_its_length_keeps_it_on_resume(build_config: Any) -> None:
    def lengthened(schedule: dict[str, Any]) -> bool:
        sdpo = {"alpha": 1.0, "alpha_schedule": schedule}
        one, other = (
            build_config(sdpo=sdpo, run={"name": "unit", "steps": steps}) for steps in (5, 9)
        )
        (change,) = changes(one, other)
        return change.safe

    assert lengthened({"warmup_steps": 2})
    assert lengthened({"decay": "linear", "by": "success"})
    assert not lengthened({"decay": "linear"})


def test_how_often_shares_are_measured_may_change_on_resume(build_config: Any) -> None:
    one, other = (build_config(trainer={"update_share_every": every}) for every in (0, 5))
    assert [change.safe for change in changes(one, other)] == [True]
    one, other = (build_config(sdpo={"alpha": 1.0, "max_update_share": s}) for s in (0.3, 0.5))
    assert [change.safe for change in changes(one, other)] == [False]


def test_everything_is_off_by_default() -> None:
    config = SdpoConfig()
    assert (config.sites, config.advantage_sites, config.min_advantage) == ("all", 4, None)
    assert not config.is_bounded


def test_actions_are_compared_by_default_where_they_can_be(build_config: Any) -> None:
    divided = {"ranks": 2, "context_parallel": 2, "packing": True}
    assert build_config(sdpo={"alpha": 0.5}).sdpo.advantage_sites == 4
    assert build_config(sdpo={"alpha": 0.5, "teacher_output": "topk"}).sdpo.advantage_sites == 0
    config = build_config(sdpo={"alpha": 0.5}, trainer=divided)
    assert config.sdpo.advantage_sites == 0
    assert type(config).model_validate(config.model_dump()) == config
