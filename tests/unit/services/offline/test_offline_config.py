"""An offline replay's config: the run's own task and seed, whoever the teachers are."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from offline_runs import BUILTIN, paid, replay_section

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml
from composer_mesh.services.directory.claim import sign
from composer_mesh.services.offline.config import merged, offline_config
from composer_mesh.services.offline.options import ReplayOptions, ReplayRefused
from composer_mesh.services.offline.traces import TraceIndex
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import make_task

ONLY_TEACHERS = {"replay": {"teachers": paid("far", "farther"), "ask": 2}}


def known(run: Path | None = None, task: str = "toolbox") -> TraceIndex:
    """Traces of a known run, or of none."""
    return TraceIndex(run, task=task)


@pytest.fixture
def run(tmp_path: Path, build_config) -> TraceIndex:
    (tmp_path / "run").mkdir()
    config = build_config(run={"seed": 11}, replay=replay_section(BUILTIN))
    (tmp_path / "run" / "config.toml").write_text(dump_toml(config))
    return known(tmp_path / "run")


def spec(folder: Path, table: dict) -> str:
    path = folder / "spec.toml"
    path.write_text(tomli_w.dumps(table))
    return str(path)


def names(config) -> list[str]:
    return [teacher.name for teacher in config.replay.teachers]


def test_without_teachers_the_runs_own_are_asked(run: TraceIndex) -> None:
    config = offline_config(run, None)
    assert names(config) == ["careful", "ordinary", "hasty"]
    assert (config.run.seed, config.replay.states_per_step) == (11, 4)


def test_a_file_of_teachers_is_laid_on_the_runs_config(run: TraceIndex, tmp_path: Path) -> None:
    config = offline_config(run, spec(tmp_path, ONLY_TEACHERS), (), 2.5)
    assert names(config) == ["far", "farther"]
    assert (config.run.seed, config.replay.states_per_step) == (11, 4)
    assert config.replay.budget.usd == 2.5


def test_a_whole_run_lends_its_teachers_but_not_its_seed(
    run: TraceIndex, tmp_path: Path, build_config
) -> None:
    other = build_config(run={"seed": 99}, replay=replay_section(BUILTIN[:2]))
    config = offline_config(run, spec(tmp_path, other.model_dump(mode="json", exclude_none=True)))
    assert (names(config), config.run.seed) == (["careful", "ordinary"], 11)


def test_a_whole_run_stands_for_traces_that_have_none(tmp_path: Path, build_config) -> None:
    other = build_config(run={"seed": 99}, replay=replay_section(BUILTIN))
    table = other.model_dump(mode="json", exclude_none=True)
    assert offline_config(known(), spec(tmp_path, table)).run.seed == 99


def test_model_ids_are_openrouters_and_all_of_them_are_asked(run: TraceIndex) -> None:
    config = offline_config(run, "a/one, b/two:free,c/three,d/four", (), 1.0)
    assert names(config) == ["a/one", "b/two:free", "c/three", "d/four"]
    assert {teacher.kind for teacher in config.replay.teachers} == {"openrouter"}
    assert config.replay.ask == 4


def test_overrides_come_last(run: TraceIndex) -> None:
    config = offline_config(run, None, ["replay.ask=2", "replay.budget.usd=3"], 1.0)
    assert (config.replay.ask, config.replay.budget.usd) == (2, 3.0)


def test_a_run_whose_channel_was_off_can_be_replayed(tmp_path: Path, build_config) -> None:
    config = build_config(replay={**replay_section(BUILTIN), "beta": 0.0})
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert offline_config(known(tmp_path), None).replay.on


def test_a_model_and_a_section_that_are_gone_since_are_not_missed(run: TraceIndex) -> None:
    assert run.run is not None
    path = run.run / "config.toml"
    text = path.read_text().replace(
        "[policy]\n", "[policy]\npath = 'gone'\nchat_date = '2026-01-31'\n"
    )
    path.write_text(f"{text}\n[a_section_of_another_version]\nkey = 1\n")
    assert offline_config(run, None).policy.path is None


@pytest.mark.parametrize(
    ("teachers", "usd", "says"),
    [
        ("gpt-5", 1.0, "neither a TOML file nor an OpenRouter model id"),
        ("missing.toml", 1.0, "missing.toml does not exist"),
        ("a/one", 1.0, "ask is 2 but there are 1 teachers"),
        (",", 1.0, "names no teacher"),
        ("a/one,a/one", 1.0, "names must be unique"),
    ],
)
def test_teachers_that_cannot_be_asked_are_refused(
    tmp_path: Path, build_config, teachers: str, usd: float | None, says: str
) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(build_config()))
    with pytest.raises((ConfigError, ReplayRefused), match=says):
        offline_config(known(tmp_path), teachers, (), usd)


@pytest.mark.parametrize("usd", [None, 0.0])
def test_paid_teachers_need_money(run: TraceIndex, tmp_path: Path, usd: float | None) -> None:
    with pytest.raises(ConfigError, match=r"budget\.usd is 0 but teacher 'far' costs money"):
        offline_config(run, spec(tmp_path, ONLY_TEACHERS), (), usd)


def test_traces_without_a_run_need_teachers() -> None:
    with pytest.raises(
        ReplayRefused, match="no teachers are given and the traces are not in a run"
    ):
        offline_config(known(), None)


def test_a_task_that_nobody_knows_is_refused_with_its_name() -> None:
    config = offline_config(known(task="chess"), "a/one,b/two", (), 1.0)
    with pytest.raises(UnusableTask, match=r"data\.task is 'chess', but .*: write"):
        make_task(config)


def test_merging_changes_neither_table() -> None:
    below, over = {"a": {"b": [1], "c": 2}}, {"a": {"b": [{"d": 3}]}}
    result = merged(below, over)
    result["a"]["b"][0]["d"] = 4
    assert (below, over) == ({"a": {"b": [1], "c": 2}}, {"a": {"b": [{"d": 3}]}})
    assert result["a"] == {"b": [{"d": 4}], "c": 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_usd": -1.0}, "--max-usd is -1"),
        ({"max_usd": float("nan")}, "--max-usd is nan"),
        ({"max_usd": float("inf")}, "--max-usd is inf"),
        ({"limit": 0}, "--limit is 0"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"out": None}, "--output is not given"),
        ({"report": Path("no/such/folder/report.json")}, "--report no/such/folder/report.json"),
    ],
)
def test_options_out_of_bounds_are_refused(changes: dict, says: str) -> None:
    with pytest.raises(ReplayRefused, match=says):
        ReplayOptions(**{"traces": Path("t"), "out": Path("o"), **changes})


HARMFUL = {
    "cache": "/home/viewer/planted.sqlite",
    "teachers": paid("evil", "worse"),
    "budget": {"usd": 1000.0, "ledger": "/home/viewer/ledger.sqlite"},
    "ask": 2,
}


def stranger(folder: Path, build_config, replay: dict) -> TraceIndex:
    """A run whose config no run of this account has written."""
    table = build_config(run={"seed": 11}).model_dump(mode="json", exclude_none=True)
    table["replay"] |= {"beta": 0.1, **replay}
    table["policy"]["cache_dir"] = "/home/viewer"
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text(tomli_w.dumps(table))
    return known(folder / "run")


def test_a_strangers_config_never_says_who_gets_keys(tmp_path: Path, build_config) -> None:
    run = stranger(tmp_path, build_config, HARMFUL)
    with pytest.raises(ReplayRefused, match=r"not written by a run of this account.*--teachers"):
        offline_config(run, None)
    with pytest.raises(ReplayRefused, match="names no teacher"):
        offline_config(run, spec(tmp_path, {"replay": {"timeout_s": 3.0}}))


def test_a_strangers_config_decides_neither_money_nor_files(tmp_path: Path, build_config) -> None:
    run = stranger(tmp_path, build_config, HARMFUL)
    config = offline_config(run, spec(tmp_path, ONLY_TEACHERS), (), 2.5)
    assert names(config) == ["far", "farther"]
    assert (config.replay.cache, config.replay.budget.ledger) == (None, None)
    assert (config.replay.budget.usd, config.run.seed) == (2.5, 11)
    assert not config.policy.cache_dir.is_absolute()


@pytest.mark.parametrize(
    "data",
    [
        'task = "evil.py:Task"',
        '[[data.mixture]]\ntask = "toolbox"\n[[data.mixture]]\ntask = "evil:Task"',
    ],
)
def test_a_strangers_config_has_no_task_imported(tmp_path: Path, build_config, data: str) -> None:
    run = stranger(tmp_path, build_config, {"teachers": BUILTIN, "ask": 3})
    path = tmp_path / "run" / "config.toml"
    written = path.read_text()
    begin = written.index("[data]")
    end = written.index("\n[", begin)
    section = data if data.startswith("[[") else f"[data]\n{data}"
    path.write_text(written[:begin] + section + "\n" + written[end:])
    with pytest.raises(ReplayRefused, match="names the task 'evil"):
        offline_config(run, None)


def test_a_strangers_config_starts_no_mcp_server(tmp_path: Path, build_config) -> None:
    run = stranger(tmp_path, build_config, {"teachers": BUILTIN, "ask": 3})
    path, mark = tmp_path / "run" / "config.toml", tmp_path / "started"
    table = f'name = "p"\ntransport = "stdio"\ncommand = "touch"\nargs = ["{mark}"]\n'
    written = path.read_text().replace("\nmcp = []\n", "\n")
    path.write_text(f"{written}\n[[environment.mcp]]\n{table}")
    with pytest.raises(UnusableTask, match="'p' are not known"):
        make_task(offline_config(run, None))
    tool = 'name = "t"\nparameters = "{}"\n'
    path.write_text(f"{path.read_text()}\n[[environment.mcp.tools]]\n{tool}")
    assert make_task(offline_config(run, None)).tools[-1]["function"]["name"] == "t"
    assert not mark.exists()


def test_who_has_read_a_strangers_config_may_name_it(tmp_path: Path, build_config) -> None:
    run = stranger(tmp_path, build_config, {**HARMFUL, "cache": str(tmp_path / "kept.sqlite")})
    assert names(offline_config(run, f"{run.run}/config.toml")) == ["evil", "worse"]


def test_builtin_teachers_of_a_stranger_are_asked_because_no_request_leaves(
    tmp_path: Path, build_config
) -> None:
    run = stranger(tmp_path, build_config, {"teachers": BUILTIN, "ask": 3})
    assert names(offline_config(run, None)) == ["careful", "ordinary", "hasty"]


def test_a_config_that_was_changed_after_its_run_wrote_it_is_a_strangers(
    tmp_path: Path, build_config
) -> None:
    config = build_config(replay=replay_section(paid("far", "farther"), 1.0))
    (tmp_path / "run").mkdir()
    path, content = tmp_path / "run" / "config.toml", dump_toml(config).encode()
    path.write_bytes(content)
    sign(path, content)
    assert names(offline_config(known(tmp_path / "run"), None)) == ["far", "farther"]
    path.write_bytes(content.replace(b"teacher.test", b"elsewhere.test"))
    with pytest.raises(ReplayRefused, match="not written by a run of this account"):
        offline_config(known(tmp_path / "run"), None)
