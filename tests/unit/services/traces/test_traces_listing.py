"""Which rollouts a list has, in which order, and how it reads at the widths of real terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from inspected_runs import a_trace, group_of, listed_of
from rich.console import Console

from composer_mesh.rollouts.traces import ErrorSite, Trace
from composer_mesh.services.store.rows import GroupRow, GroupState, LateReward
from composer_mesh.services.traces.list_page import ListPage, path_of
from composer_mesh.services.traces.listing import Listing, acted, fits, listed, listing, where
from composer_mesh.services.traces.options import Filters, TracesOptions, TracesRefused
from composer_mesh.tasks.toolbox import ToolboxTask

EVIL = "[bold red]x[/] \x1b[2J\u202ey"


def traces_of(task: ToolboxTask) -> list[Trace]:
    return [trace for group in range(4) for trace in group_of(task, group)]


def page(found: Listing, traces: Sequence[Trace], width: int, **options: Any) -> list[str]:
    """The lines of a list as a terminal shows them."""
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    by_id = {trace.trace_id: trace for trace in traces}
    console.print(ListPage(found, by_id, **options).draw(width))
    return [line.rstrip() for line in out.getvalue().split("\n")]


def test_rollouts_are_sorted_and_equal_ones_keep_the_order_of_their_groups(
    toolbox: ToolboxTask,
) -> None:
    rows = [listed_of(trace) for trace in reversed(traces_of(toolbox))]
    for reverse in (False, True):
        found = [one.row for one in listing(rows, "turns", reverse, 0).shown]
        turns = [row.turns for row in found]
        assert turns == sorted(turns, reverse=reverse)
        for length in set(turns):
            equal = [(row.group_id, row.sample) for row in found if row.turns == length]
            assert equal == sorted(equal)


def test_what_the_limit_hides_counts_in_the_sums(toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox)
    found = listing([listed_of(trace) for trace in traces], "group", False, 2)
    assert (len(found.shown), found.hidden, found.tally.count) == (2, 10, 12)
    assert found.tally.mean_reward == pytest.approx(sum(t.reward for t in traces) / 12)
    kinds = [site.error_kind for trace in traces for site in trace.error_sites]
    assert dict(found.tally.errors) == {kind: kinds.count(kind) for kind in kinds}


def test_a_row_has_the_step_of_its_group_and_the_last_late_reward() -> None:
    row = listed_of(a_trace()).row
    group = GroupRow(0, GroupState.TRAINED, 0, 1.0, 7, 1, 10, 0)
    rewards = [LateReward(1, row.trace_id, 0.5, ""), LateReward(2, row.trace_id, 0.9, "judge")]
    (one,) = listed([row], [group], rewards)
    assert one.step == 7
    assert one.late == rewards[1]
    assert (one.as_dict()["step"], one.as_dict()["late_reward"]) == (7, 0.9)


def test_steps_are_counted_as_in_the_metrics() -> None:
    assert where(Filters(step=3)).step == 2
    assert where(Filters()).step is None


def test_of_several_errors_one_is_enough() -> None:
    row = replace(listed_of(a_trace()).row, error_kinds=("wrong_answer",))
    assert fits(row, Filters(errors=("no_answer", "wrong_answer")))
    assert not fits(row, Filters(errors=("no_answer", "bad_value")))
    assert fits(replace(row, error_kinds=()), Filters())


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("sort", ["group", "errors"])
def test_a_list_keeps_to_its_width_and_names_each_rollout_once(
    width: int, sort: Any, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox)
    found = listing([listed_of(trace) for trace in traces], sort, True, 0)
    lines = page(found, traces, width, grouped=sort == "group")
    assert max(map(len, lines)) <= width
    for trace in traces:
        (line,) = [line for line in lines if line.startswith(trace.trace_id)]
        assert f"{'✓' if trace.success else '✗'} {trace.reward:.2f}" in line
        assert trace.error_sites == [] or trace.error_sites[0].error_kind in line
    assert sum(line.startswith("rollout ") for line in lines) == 1
    assert sum(line.startswith("group ") for line in lines) == (4 if sort == "group" else 0)


def test_columns_stand_under_each_other_in_every_group(toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox)
    lines = page(listing([listed_of(t) for t in traces], "group", False, 0), traces, 80)
    marks = {line.index("✓ " if "✓ " in line else "✗ ") for line in lines if line[:6] == "train-"}
    assert len(marks) == 1


def test_a_wide_list_tells_what_each_rollout_did(toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox)
    found = listing([listed_of(trace) for trace in traces], "group", False, 0)
    wide, narrow = (page(found, traces, width) for width in (200, 80))
    assert any('lookup(key="' in line for line in wide)
    assert not any("lookup(" in line for line in narrow)


def test_a_heading_says_what_was_asked_and_what_became_of_the_group() -> None:
    trace = a_trace()
    new, old = listed_of(trace), listed_of(trace, step=4)
    for one, said in ((new, "not trained"), (old, "step 4")):
        heading = page(Listing([one], listing([one], "group", False, 0).tally), [trace], 80)[0]
        assert heading.startswith("group 0  How much?")
        assert heading.endswith(said)


def test_a_group_that_cannot_be_read_says_why_and_is_listed() -> None:
    trace = a_trace()
    found = listing([listed_of(trace)], "group", False, 0)
    lines = page(found, [], 80, damage={0: "its CRC-32 is another one"})
    assert lines[0].startswith("group 0  its CRC-32 is another one")
    assert lines[2].startswith(trace.trace_id)


def test_no_text_of_a_model_is_markup_or_a_control_code() -> None:
    said = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]
    site = ErrorSite(0, EVIL, "wrong_answer", {})
    trace = a_trace(task=EVIL, messages=said, error_sites=[site])
    lines = page(listing([listed_of(trace)], "group", False, 0), [trace], 200)
    assert all(line.isprintable() for line in lines if line)
    assert any("[bold red]x[/]" in line for line in lines)


def test_an_empty_list_says_so() -> None:
    assert page(listing([], "group", False, 50), [], 80) == ["no rollout fits", ""]


@pytest.mark.parametrize("width", [1, 10, 30, 60, 200])
def test_a_path_leaves_out_its_middle_and_keeps_its_end(width: int, toolbox: ToolboxTask) -> None:
    longest = max(traces_of(toolbox), key=lambda trace: len(trace.turns))
    whole, cut = path_of(longest, 10_000).plain, path_of(longest, width).plain
    last = whole.rpartition(" → ")[2]
    assert cut.endswith(last)
    assert whole.count(" → ") == len(longest.turns) - 1
    assert len(cut) <= max(width, len(last) + 40)


def test_messages_that_nobody_sampled_belong_to_the_opening() -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "shown before"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "sampled"},
        {"role": "tool", "content": "c"},
    ]
    conversation = acted(a_trace(messages=said))
    assert conversation.opening == said[:3]
    (turn,) = conversation.turns
    assert (turn.message, turn.answers) == (said[3], said[4:])


def test_a_turn_without_a_message_is_still_a_turn() -> None:
    conversation = acted(a_trace(messages=[{"role": "user", "content": "a"}]))
    assert [turn.message for turn in conversation.turns] == [None]
    assert len(conversation.opening) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"action": "show"}, "add its trace_id"),
        ({"action": "list", "trace": "t"}, "write show"),
        ({"action": "export"}, "add --output DIR"),
        ({"limit": -1}, "0 shows every rollout"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Any
) -> None:
    with pytest.raises(TracesRefused, match=said):
        TracesOptions(tmp_path, **settings)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"min_reward": 1.0, "max_reward": 0.5}, "exchange them"),
        ({"max_reward": float("nan")}, "must be a number"),
    ],
)
def test_rewards_that_no_rollout_can_have_are_refused(bounds: dict[str, float], said: str) -> None:
    with pytest.raises(TracesRefused, match=said):
        Filters(**bounds)
