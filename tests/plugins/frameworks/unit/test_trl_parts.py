"""Pairs and hinted tokens of TRL's microbatches: each once, with the divisor of its own step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hinted import view
from hypothesis import given
from hypothesis import strategies as some
from offline_runs import COST, ENVIRON, knowing, paid, traces_of
from trl_runs import pair_rows

from composer_mesh.plugins.frameworks.trl.pairs import (
    NoPairs,
    PairSettings,
    StoredPairs,
    TeacherPairs,
    grouped,
)
from composer_mesh.plugins.frameworks.trl.parts import BatchLayout, dealt, parts_of
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.money import dollars
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.toolbox import ToolboxTask

counts = some.integers(1, 6)


def pairs(count: int) -> list[PairSample]:
    return [PairSample(f"p{place}", [1], [2], [3]) for place in range(count)]


@given(counts, counts, counts, some.integers(0, 30))
def test_every_pair_is_dealt_once_and_evenly(
    microbatches: int, accumulated: int, ranks: int, count: int
) -> None:
    layout = BatchLayout(microbatches, accumulated, ranks)
    found = dealt(pairs(count), layout)
    ids = [pair.pair_id for at in found for own in at for pair in own]
    assert sorted(ids) == sorted(one.pair_id for one in pairs(count))
    by_step = [0] * layout.steps
    for at, own in enumerate(found):
        by_step[layout.step_of(at)] += sum(map(len, own))
    assert max(by_step) - min(by_step) <= 1


@given(counts, counts, counts, some.integers(0, 9), some.data())
def test_losses_of_all_microbatches_and_ranks_add_up_to_the_mean_of_a_step(
    steps: int, accumulated: int, ranks: int, count: int, data: some.DataObject
) -> None:
    layout = BatchLayout(steps * accumulated, accumulated, ranks)
    numbers = some.lists(
        some.lists(some.integers(0, 3), min_size=layout.microbatches, max_size=layout.microbatches),
        min_size=ranks,
        max_size=ranks,
    )
    lengths = data.draw(numbers)
    rows = [[[[view("t", response=n)] if n else []] for n in own] for own in lengths]
    tokens = [list(column) for column in zip(*lengths, strict=True)]
    shared, weights = pairs(count), [0.0] * steps
    pair_weights = [0.0] * steps
    for rank in range(ranks):
        for at, part in enumerate(parts_of(rows[rank], tokens, shared, layout, rank)):
            step = layout.step_of(at)
            weights[step] += tokens[at][rank] / part.sdpo_tokens if tokens[at][rank] else 0
            pair_weights[step] += len(part.pairs) / part.pair_count if part.pairs else 0
            assert part.any_rank_has_views == any(tokens[at])
    assert all(one in (0, pytest.approx(1)) for one in weights)
    assert all(one in (0, pytest.approx(1)) for one in pair_weights)


def test_a_part_of_a_step_has_the_divisor_of_a_whole_one() -> None:
    layout = BatchLayout(microbatches=2, accumulated=8)
    parts = parts_of([[[view("t", response=3)]], [[]]], [[3], [0]], pairs(2), layout)
    assert [part.sdpo_tokens for part in parts] == [12, 12]
    assert [part.pair_count for part in parts] == [8, 8]
    assert layout.share(32) == 8


def settings(tokenizer: Any, task: ToolboxTask, folder: Path) -> PairSettings:
    return PairSettings(ChatFormat(tokenizer, task.tools), 512, 4, 7, folder)


def test_stored_pairs_come_in_an_order_of_the_step_and_every_epoch_has_all(
    tmp_path: Path, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    rows, file = pair_rows(toolbox, 7), tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [StoredPairs(file, per_step=3), StoredPairs(rows, per_step=3)]
    for source in sources:
        source.open(settings(tokenizer, toolbox, tmp_path))
    first, again = ([s.pairs(step, 1.0, ())[0] for step in range(7)] for s in sources)
    assert first == again
    ids = [pair.pair_id for step in first for pair in step]
    assert sorted(ids[:7]) == sorted(ids[7:14]) == sorted(row["state_id"] for row in rows)
    assert ids[:7] != ids[7:14]
    chat = ChatFormat(tokenizer, toolbox.tools)
    (pair,) = (one for one in first[0] if one.pair_id == ids[0])
    row = next(row for row in rows if row["state_id"] == ids[0])
    assert chat.action_text(pair.chosen_ids) == row["chosen"][0]["content"]
    assert pair.context_ids == chat.first_prompt(row["prompt"])


def test_rows_that_are_no_pairs_are_refused(
    tmp_path: Path, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    where = settings(tokenizer, toolbox, tmp_path)
    with pytest.raises(NoPairs, match="row 0 has no rejected"):
        StoredPairs([{"prompt": [{}], "chosen": [{}]}]).open(where)
    with pytest.raises(NoPairs, match="none of 0 pairs"):
        StoredPairs([]).open(where)
    file = tmp_path / "pairs.jsonl"
    for line, said in ((b"{", "is not valid JSON"), ('{"é": 1}'.encode("latin-1"), "is not UTF-8")):
        file.write_bytes(b"{}\n" + line + b"\n")
        with pytest.raises(UnusableTask, match=rf"pairs\.jsonl: line 2 {said}"):
            StoredPairs(file).open(where)
    with pytest.raises(ValueError, match="per_step is 0"):
        StoredPairs([], per_step=0)


def test_teachers_make_pairs_of_rollouts_and_stop_at_the_ceiling(
    tmp_path: Path, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    provider, ceiling = knowing(toolbox), 0.012
    source = TeacherPairs(
        paid("a", "b", "c"),
        ceiling,
        overrides=["replay.states_per_step=8"],
        environ=ENVIRON,
        transport=provider.transport,
    )
    where = replace(settings(tokenizer, toolbox, tmp_path), max_context=100_000)
    source.open(where)
    traces, usd, ids = traces_of(toolbox, 24), 0.0, list[str]()
    for step in range(6):
        found, figures = source.pairs(step, 1.0, traces[step * 12 : step * 12 + 12])
        usd, ids = usd + figures["replay/usd"], ids + [pair.pair_id for pair in found]
    source.close()
    assert len(ids) == len(set(ids)) > 0
    assert 0 < usd <= ceiling < 24 * 2 * 3 * COST
    assert usd == pytest.approx(dollars(provider.charged))
    source.close()


def test_a_group_that_was_played_on_two_ranks_is_one_again(toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox, 3, size=2)
    mixed = [traces[at] for at in (0, 2, 4, 1, 3, 5)]
    found = grouped(mixed, 10)
    assert [[one.index for one in group] for group in found] == [[0, 0], [1, 1], [2, 2]]
    assert [group[0].group_id for group in found] == [10, 11, 12]
    assert len({one.trace_id for group in found for one in group}) == 6
