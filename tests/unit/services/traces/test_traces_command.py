"""`composer-mesh traces` on the store of a run: what it finds, what it says, what it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from inspected_runs import a_pair, group_of, write_run

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import pair_record
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn, trace_from_json
from composer_mesh.services.cli import main
from composer_mesh.services.offline.traces import index_traces
from composer_mesh.services.replay.post_reward import follow_rewards, post_reward
from composer_mesh.services.store.group_files import path_of
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

GROUPS, STEPS = 6, 2


@pytest.fixture(scope="module")
def groups() -> list[list[Trace]]:
    task = ToolboxTask.create(TaskSettings(seed=3, tool_error_penalty=0.1))
    return [group_of(task, group_id) for group_id in range(GROUPS)]


@pytest.fixture
async def run(tmp_path: Path, build_config: Any, groups: list[list[Trace]]) -> Path:
    """Two steps of two groups each are trained, two groups are left."""
    config: Config = build_config(sdpo={"alpha": 0.5}, late_rewards={"max_age": 2})
    await write_run(tmp_path / "run", config, groups, STEPS)
    return tmp_path / "run"


def flat(groups: list[list[Trace]]) -> list[Trace]:
    return [trace for group in groups for trace in group]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["traces", *map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["trace_id"] for row in rows]


async def test_each_filter_leaves_the_rollouts_that_it_names(
    run: Path, groups: list[list[Trace]], capsys: pytest.CaptureFixture[str]
) -> None:
    traces = flat(groups)
    kind = next(site.error_kind for trace in traces for site in trace.error_sites)
    expected = {
        (): traces,
        ("--group", 3): groups[3],
        ("--step", 2): [*groups[2], *groups[3]],
        ("--split", "heldout"): [],
        ("--failed",): [trace for trace in traces if not trace.success],
        ("--min-reward", 0.8): [trace for trace in traces if trace.reward >= 0.8],
        ("--max-reward", 0.8): [trace for trace in traces if trace.reward <= 0.8],
        ("--error", kind): [
            trace for trace in traces if any(s.error_kind == kind for s in trace.error_sites)
        ],
        ("--limit", 2): traces[:2],
    }
    for options, wanted in expected.items():
        found = names(printed(capsys, run, *options))
        assert found == [trace.trace_id for trace in wanted], options


async def test_a_row_says_what_became_of_its_rollout(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post_reward(run, "train-000005-001", 0.25, "judge")
    rows = {row["trace_id"]: row for row in printed(capsys, run)}
    first, last = rows["train-000002-000"], rows["train-000005-001"]
    assert (first["state"], first["step"], first["late_reward"]) == ("trained", 2, None)
    assert (last["state"], last["step"], last["late_reward"]) == ("finished", None, 0.25)


async def test_a_file_of_rewards_is_posted_as_a_whole_or_not_at_all(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def post(*lines: dict[str, object]) -> int:
        file = tmp_path / "posts.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return main(["reward", str(run), "--file", str(file)])

    good = [{"trace_id": f"train-000005-{n:03d}", "reward": n / 2} for n in (0, 1)]
    assert post(*good, {"trace_id": "train-009999-000", "reward": 1.0}) != 0
    assert post(*good, {"trace_id": "train-000005-001"}) != 0
    assert main(["reward", str(run), "train-000005-000"]) != 0
    assert "give one of them" in capsys.readouterr().err
    assert not [row for row in printed(capsys, run) if row["late_reward"] is not None]
    assert post(*good) == 0
    rows = {row["trace_id"]: row["late_reward"] for row in printed(capsys, run)}
    assert (rows["train-000005-000"], rows["train-000005-001"]) == (0.0, 0.5)


async def test_a_rollout_is_shown_with_all_that_the_store_has(
    run: Path, groups: list[list[Trace]], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = next(trace for trace in flat(groups) if trace.error_sites)
    (found,) = printed(capsys, run, "show", trace.trace_id)
    assert found["messages"] == trace.messages
    assert [Turn(**turn) for turn in found["turns"]] == trace.turns
    assert [hint["turn"] for hint in found["hints"]] == list(
        dict.fromkeys(site.turn for site in trace.error_sites)
    )
    assert found["answer"] is not None
    assert found["asked"]["outcomes"] == {"pair": 2}
    assert main(["traces", str(run), "show", trace.trace_id]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(trace.trace_id)
    assert all(f"error │ {site.error_kind}" in shown for site in trace.error_sites)


async def test_a_pair_that_a_filter_dropped_is_shown_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {}
    for sample in range(3):
        (found,) = printed(capsys, run, "show", f"0/{sample}")
        states[sample] = [(pair["state"], pair["step"]) for pair in found["pairs"]]
    assert states == {0: [("trained", 1)], 1: [("dropped by a filter", None)], 2: []}


@pytest.mark.parametrize("name", ["train-000009-000", "1/9", "77/0", "nobody"])
async def test_a_rollout_that_is_not_there_is_named_with_one_that_is(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["traces", str(run), "show", name]) == 1
    error = capsys.readouterr().err
    assert f"no rollout {name}: it has for example train-00000" in error


async def test_a_damaged_group_is_named_and_the_others_are_listed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(run, 1)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert main(["traces", str(run)]) == 1
    out = capsys.readouterr().out
    assert "group 1  " in out
    assert "is damaged" in out
    assert out.count("train-00000") == GROUPS * 3
    assert main(["traces", str(run), "show", "1/0"]) == 1
    assert "CRC-32" in capsys.readouterr().err
    assert main(["traces", str(run), "export", "--output", str(tmp_path / "out")]) == 1
    assert "left out: " in capsys.readouterr().out
    assert pq.read_table(tmp_path / "out" / "traces.parquet").num_rows == (GROUPS - 1) * 3


async def test_a_directory_without_a_store_is_one_sentence_and_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["traces", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("composer-mesh: ")


async def test_json_lines_are_the_traces_again_and_can_be_replayed_offline(
    run: Path, groups: list[list[Trace]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["traces", str(run), "export", "--format", "jsonl", "--output", str(out)]) == 0
    lines = (out / "traces.jsonl").read_bytes().splitlines()
    assert [trace_from_json(line) for line in lines] == flat(groups)
    assert index_traces(out / "traces.jsonl").traces == GROUPS * 3
    pairs = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    assert pairs == [json.loads(json.dumps(pair_record(a_pair(group[0])))) for group in groups]
    assert sorted(path.name for path in out.iterdir()) == ["pairs.jsonl", "traces.jsonl"]


AS_THEY_ARE = (
    *("trace_id", "group_id", "sample", "task", "split", "index"),
    *("reward", "success", "answer", "role", "advantage"),
)


def trace_of(row: dict[str, Any]) -> Trace:
    """A row of a Parquet file as the trace that it was."""
    sites = [{**site, "data": json.loads(site["data"])} for site in row["error_sites"]]
    values: dict[str, Any] = {
        **{name: row[name] for name in AS_THEY_ARE},
        "turns": [Turn(**turn) for turn in row["turns"]],
        "messages": json.loads(row["messages"]),
        "error_sites": [ErrorSite(**site) for site in sites],
        "rewards": json.loads(row["rewards"]),
    }
    return Trace(**values)


async def test_a_parquet_file_holds_every_bit_of_the_traces(
    run: Path, groups: list[list[Trace]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["traces", str(run), "export", "--output", str(out)]) == 0
    rows = pq.read_table(out / "traces.parquet").to_pylist()
    assert [trace_of(row) for row in rows] == flat(groups)
    assert [row["step"] for row in rows] == [1] * 6 + [2] * 6 + [None] * 6
    pairs = pq.read_table(out / "pairs.parquet").to_pylist()
    assert pairs == [pair_record(a_pair(group[0])) for group in groups]


async def test_an_export_of_nothing_has_the_columns_of_one_of_much(
    run: Path, tmp_path: Path
) -> None:
    for name, options in (("all", []), ("none", ["--split", "heldout"])):
        assert main(["traces", str(run), "export", *options, "--output", str(tmp_path / name)]) == 0
    for file in ("traces.parquet", "pairs.parquet"):
        whole, empty = (pq.read_table(tmp_path / name / file) for name in ("all", "none"))
        assert empty.schema == whole.schema
        assert empty.num_rows == 0 < whole.num_rows


async def test_an_export_has_the_rollouts_that_fit_and_their_pairs(
    run: Path, tmp_path: Path
) -> None:
    options = ["--format", "jsonl", "--step", "1", "--output", str(tmp_path / "out")]
    assert main(["traces", str(run), "export", *options]) == 0
    lines = (tmp_path / "out" / "traces.jsonl").read_bytes().splitlines()
    assert {trace_from_json(line).group_id for line in lines} == {0, 1}
    assert len((tmp_path / "out" / "pairs.jsonl").read_text().splitlines()) == 2


async def test_no_export_is_overwritten(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text("mine")
    options = ["export", "--format", "jsonl", "--output", str(tmp_path)]
    assert main(["traces", str(run), *options]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "pairs.jsonl").read_text() == "mine"
    assert not (tmp_path / "traces.jsonl").exists()


async def test_a_file_that_is_followed_is_posted_as_it_grows_and_as_rollouts_are_stored(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, said = tmp_path / "queue.jsonl", list[str]()
    early, late = "train-000005-000", "train-009999-000"
    additions = [
        f'{{"trace_id": "{late}", "reward": 1.0}}\n{{"trace_id": "{early}", "rew',
        'ard": 0.75}\nno post\n{"trace_id": "train-000005-001", "reward": NaN}\n',
    ]

    def add() -> None:
        with file.open("a") as queue:
            queue.write(additions.pop(0))

    code = follow_rewards(
        *(run, file, "a reviewer"), more=lambda: bool(additions), wait=add, report=said.append
    )
    rows = {row["trace_id"]: row for row in printed(capsys, run)}
    assert rows[early]["late_reward"] == 0.75
    assert rows["train-000005-001"]["late_reward"] is None
    assert code == 1
    assert [line.partition(":")[0] for line in said[:2]] == [
        "line 3 is not a post and left out",
        "line 4 is not a post and left out",
    ]
    assert said[2].startswith("1 rewards are for rollouts that")
    assert late in said[2]


async def test_a_file_that_is_followed_again_undoes_no_later_post_of_others(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trace = tmp_path / "queue.jsonl", "train-000005-000"
    line = '{"trace_id": "train-000005-000", "reward": REWARD}\n'
    file.write_text(line.replace("REWARD", "0.75") + line.replace("REWARD", "0.5"))
    assert main(["reward", str(run), "--follow", str(file)]) == 0
    assert main(["reward", str(run), trace, "0.25", "--source", "a reviewer"]) == 0
    assert main(["reward", str(run), "--follow", str(file)]) == 0
    assert {row["trace_id"]: row for row in printed(capsys, run)}[trace]["late_reward"] == 0.25
    file.write_text(file.read_text() + line.replace("REWARD", "0.5"))
    assert main(["reward", str(run), "--follow", str(file)]) == 0
    assert {row["trace_id"]: row for row in printed(capsys, run)}[trace]["late_reward"] == 0.5
    assert main(["reward", str(run), "--follow", str(file), "--file", str(file)]) == 2
