"""Pairs are written whole, and nothing of another job or of a person is ever replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.offline.output import ReplayOutput, check_place, folder_of, job_of

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
