"""Files of an offline replay: traces are found and checked first, pairs never replace another's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from offline_runs import (
    BUILTIN,
    play,
    replay_section,
    traces_of,
    write_older_run,
    write_run,
    write_traces,
)

from composer_mesh.rollouts.traces import trace_to_json
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.offline.output import ReplayOutput, check_place, folder_of, job_of
from composer_mesh.services.offline.traces import TraceFileError, index_traces
from composer_mesh.services.store.group_files import path_of
from composer_mesh.tasks.toolbox import ToolboxTask


@pytest.fixture
def run(tmp_path: Path, build_config, toolbox: ToolboxTask) -> Path:
    config = build_config(replay=replay_section(BUILTIN))
    return write_older_run(tmp_path / "run", config, traces_of(toolbox, 3))


@pytest.fixture
def stored(tmp_path: Path, build_config, toolbox: ToolboxTask) -> Path:
    config = build_config(replay=replay_section(BUILTIN))
    return write_run(tmp_path / "stored", config, traces_of(toolbox, 3))


@pytest.mark.parametrize("place", [".", "traces"])
def test_a_store_has_the_same_groups_and_mark_as_a_file_of_its_traces(
    run: Path, stored: Path, place: str
) -> None:
    index, older = index_traces(stored / place), index_traces(run)
    assert index.run == stored
    assert (len(index), index.traces, index.task) == (3, 9, "toolbox")
    assert list(index.groups()) == list(older.groups())
    assert index.mark == older.mark


def test_a_damaged_group_of_a_store_is_refused_before_anybody_is_asked(stored: Path) -> None:
    path = path_of(stored, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceFileError, match=r"000001\.safetensors is damaged"):
        index_traces(stored)


@pytest.mark.parametrize("place", [".", "traces", "traces/traces.jsonl"])
def test_a_run_its_folder_and_its_file_are_the_same_traces(run: Path, place: str) -> None:
    index = index_traces(run / place)
    assert index.run == run
    assert (len(index), index.traces, index.task) == (3, 9, "toolbox")


def test_a_file_elsewhere_belongs_to_no_run(tmp_path: Path, toolbox: ToolboxTask) -> None:
    assert index_traces(write_traces(tmp_path / "mine.jsonl", traces_of(toolbox, 1))).run is None


def test_groups_come_whole_and_by_their_ids_however_the_file_mixes_them(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 3)
    index = index_traces(write_traces(tmp_path / "t.jsonl", traces[::-1]))
    groups = list(index.groups())
    assert [[trace.group_id for trace in group] for group in groups] == [[0] * 3, [1] * 3, [2] * 3]
    assert {trace.trace_id: trace for group in groups for trace in group} == {
        trace.trace_id: trace for trace in traces
    }


def test_groups_may_be_spread_over_files(tmp_path: Path, toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox, 2)
    for place in (0, 1):
        write_traces(tmp_path / f"part-{place}.jsonl", traces[place::2])
    assert [len(group) for group in index_traces(tmp_path).groups()] == [3, 3]


def test_held_out_traces_are_not_replayed(tmp_path: Path, toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox, 1)
    held = replace(traces[0], trace_id="heldout-000000-000", split="heldout")
    assert index_traces(write_traces(tmp_path / "t.jsonl", [*traces, held])).traces == 3


def test_a_corrupt_line_is_named_with_its_number(run: Path) -> None:
    path = run / "traces" / "traces.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b'{"trace_id": "x"}\n', *lines[4:]]))
    with pytest.raises(TraceFileError, match=r"traces\.jsonl line 5 is no trace .*: repair or rem"):
        index_traces(run)


def test_what_a_corrupt_line_holds_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"secret": "sk-in-the-line"}\n')
    with pytest.raises(TraceFileError) as caught:
        index_traces(path)
    assert "sk-in-the-line" not in str(caught.value)


def test_a_last_line_that_is_still_written_is_left_out_and_counted(run: Path) -> None:
    path = run / "traces" / "traces.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    index = index_traces(run)
    assert (index.traces, index.cut) == (8, 1)


def test_a_trace_that_is_there_twice_is_refused_with_both_places(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 1)
    path = write_traces(tmp_path / "t.jsonl", [*traces, traces[0]])
    with pytest.raises(TraceFileError, match=r"line 1 and in .* line 4"):
        index_traces(path)


def test_a_folder_of_other_files_is_no_folder_of_traces(run: Path) -> None:
    (run / "traces" / "traces.jsonl").unlink()
    (run / "traces").rmdir()
    with pytest.raises(TraceFileError, match="holds no traces"):
        index_traces(run)


@pytest.mark.parametrize("name", ["missing", "missing.jsonl"])
def test_traces_that_do_not_exist_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFileError, match="does not exist: name a run directory"):
        index_traces(tmp_path / name)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="holds no training trace"):
        index_traces(write_traces(tmp_path / "t.jsonl", []))


def test_the_mark_stays_while_traces_are_added_and_differs_between_runs(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 2)
    first = index_traces(write_traces(tmp_path / "a.jsonl", traces[:3])).mark
    grown = index_traces(write_traces(tmp_path / "b.jsonl", traces)).mark
    other = index_traces(write_traces(tmp_path / "c.jsonl", [play(toolbox, 0, 7)])).mark
    assert first == grown != other


def test_a_file_that_changes_during_the_replay_is_noticed(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    path = write_traces(tmp_path / "t.jsonl", traces_of(toolbox, 2))
    index = index_traces(path)
    path.write_bytes(b"x" + trace_to_json(play(toolbox, 0, 0)) + b"\n")
    with pytest.raises(TraceFileError, match="no longer the trace that it was"):
        list(index.groups())


JOB = {"traces": "mark", "teachers": [{"name": "a"}], "rules": {"ask": 3}}


def write(out: Path, *rows: dict, job: dict = JOB) -> None:
    with ReplayOutput.open(out, job) as output:
        output.write_pairs(rows)


def test_the_same_job_replaces_its_own_pairs(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    write(out, {"n": 1}, {"n": 2})
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"n": 1}, {"n": 2}]


def test_nothing_but_the_pairs_and_their_folder_is_left(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", {"n": 1})
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == [".lock", "job.json", "pairs.jsonl", "pairs.jsonl.replay"]


def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ReplayRefused, match="would be lost: move it away"):
        write(out)
    assert out.read_text() == "mine\n"
    assert not folder_of(out).exists()


def test_pairs_that_a_person_has_changed_are_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    out.write_text('{"n": 7}\n')
    with pytest.raises(ReplayRefused, match="something else than the last replay"):
        write(out)
    assert out.read_text() == '{"n": 7}\n'


@pytest.mark.parametrize("key", JOB)
def test_pairs_of_another_job_are_never_replaced(tmp_path: Path, key: str) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    with pytest.raises(ReplayRefused, match=f"a replay with other {key}: ask for the same"):
        write(out, job={**JOB, key: "other"})


def test_the_job_goes_on_after_its_pairs_were_moved_away(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    out.rename(tmp_path / "kept.jsonl")
    write(out, {"n": 2})
    assert out.exists()


def test_an_interruption_between_the_hash_and_the_pairs_stops_nobody(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    before = out.read_bytes()
    write(out, {"n": 2})
    out.write_bytes(before)  # as if the second writing had ended after it wrote down its hash
    write(out, {"n": 3})
    assert json.loads(out.read_text()) == {"n": 3}


def test_two_replays_never_write_to_one_place(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    with ReplayOutput.open(out, JOB), pytest.raises(ReplayRefused, match="wait for the other"):
        write(out)


@pytest.mark.parametrize("out", [".", "no/such/folder/pairs.jsonl"])
def test_a_place_that_can_hold_no_file_is_refused(tmp_path: Path, out: str) -> None:
    with pytest.raises(ReplayRefused, match="must be a file in a folder that is there"):
        check_place(tmp_path / out, JOB)


def test_a_folder_that_no_replay_wrote_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "pairs.jsonl")
    folder.mkdir()
    (folder / "job.json").write_text("[]")
    with pytest.raises(ReplayRefused, match="is not what a replay wrote there"):
        check_place(tmp_path / "pairs.jsonl", JOB)


def test_a_report_is_kept_beside_the_pairs_and_where_it_is_wanted(tmp_path: Path) -> None:
    with ReplayOutput.open(tmp_path / "p.jsonl", JOB) as output:
        output.write_report({"state": "finished"}, tmp_path / "report.json")
    places = (tmp_path / "report.json", folder_of(tmp_path / "p.jsonl") / "report.json")
    assert [json.loads(place.read_text()) for place in places] == [{"state": "finished"}] * 2


def test_a_higher_ceiling_and_patience_are_the_same_job_other_rules_are_not(build_config) -> None:
    def job(**replay) -> dict:
        return job_of(build_config(replay=replay), "mark")

    same = job(budget={"usd": 5.0}, timeout_s=9.0, attempts=2, states_per_step=99)
    assert same == job()
    assert job(ask=4) != job()
    assert job(gate={"min_value": 0.5}) != job()
    assert job(filters=[]) != job()
