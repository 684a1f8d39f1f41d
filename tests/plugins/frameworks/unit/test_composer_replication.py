"""The composer-replication framework's names, arguments, defaults; docs/composer-replication.md."""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import Guide, names_in_code
from offline_runs import ENVIRON, knowing, paid

from composer_mesh.losses.distillation import TaidSchedule
from composer_mesh.plugins.frameworks import composer_replication
from composer_mesh.plugins.frameworks import composer_replication as theirs
from composer_mesh.plugins.frameworks.harness import compose_loss
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 + 7"}}\n</tool_call>'


def defaults(function: Any) -> dict[str, Any]:
    """A function's arguments that have a default."""
    signature = inspect.signature(function).parameters
    return {name: one.default for name, one in signature.items() if one.default is not one.empty}


def test_arguments_and_defaults_are_the_frameworks() -> None:
    composed = defaults(theirs.compose_loss)
    assert list(composed) == [
        "alpha_sdpo", "beta_replay", "dpo_variant", "simpo_beta", "simpo_gamma", "sdpo_wrapper",
        "taid_t", "entropy_opd_h_max",
    ]  # fmt: skip
    assert (composed["simpo_beta"], composed["simpo_gamma"]) == (2.0, 1.0)
    assert defaults(theirs.TAIDScheduler) == {
        "t_start": 0.4, "t_end": 1.0, "alpha": 5e-4, "beta": 0.99, "disable_adaptive": False,
    }  # fmt: skip
    assert defaults(theirs.replay_trace)["max_total_usd"] == 10.0
    assert defaults(theirs.extract_dpo_pairs) == {"agreement_threshold": 2}


@pytest.fixture
def batch() -> dict[str, Any]:
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    answer = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    pairs = {
        f"dpo_{side}_{name}": value
        for side, shift in (("chosen", 20), ("rejected", 40))
        for name, value in {
            "input_ids": ids + shift,
            "response_mask": answer,
            "ref_logprobs": torch.tensor([-7.0, -9.0]),
        }.items()
    }
    hinted = torch.cat([ids[:, :2], torch.full((2, 3), 30), ids[:, 2:]], dim=1)
    return {
        "input_ids": ids,
        "response_mask": answer,
        "ctx_teacher_input_ids": hinted,
        "sdpo_loss_mask": answer,
        **pairs,
    }


@pytest.mark.parametrize("variant", ["dpo", "ipo", "simpo"])
def test_a_composed_loss_is_ours(build_model: Any, batch: dict[str, Any], variant: str) -> None:
    model = build_model(1)
    found = theirs.compose_loss(model, batch, 0.3, 0.2, dpo_variant=variant)
    ours = compose_loss(
        model, batch, alpha_sdpo=0.3, beta_replay=0.2, dpo_variant=variant, simpo_gamma=1.0
    )
    assert found.total.item() == ours.total.item()
    for name, own in (("lm_ce", "lm_ce"), ("sdpo_jsd", "sdpo_jsd"), ("trace_replay_dpo", "replay")):
        assert getattr(found, name).item() == getattr(ours, own).item() > 0


def test_empty_or_missing_keys_turn_a_channel_off_and_say_so(
    build_model: Any, batch: dict[str, Any]
) -> None:
    model = build_model(1)
    empty = {**batch, "dpo_chosen_input_ids": torch.empty(0, 5), "ctx_teacher_input_ids": None}
    found = theirs.compose_loss(model, empty)
    assert (found.sdpo_jsd, found.trace_replay_dpo) == (None, None)
    assert found.off.keys() == {"sdpo_jsd", "trace_replay_dpo"}
    assert found.total.item() == found.lm_ce.item()  # type: ignore[union-attr]


def test_a_mask_of_floats_is_a_mask_and_weights_are_none(
    build_model: Any, batch: dict[str, Any]
) -> None:
    model, floats = build_model(1), dict(batch)
    floats["response_mask"] = batch["response_mask"].float()
    assert theirs.compose_loss(model, floats).total == theirs.compose_loss(model, batch).total
    floats["response_mask"] = batch["response_mask"] * 0.5
    with pytest.raises(ValueError, match="response_mask has other values"):
        theirs.compose_loss(model, floats)


def test_taid_is_a_mean_and_its_scheduler_moves_as_ours() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 7, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    expected = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)[mask.bool()].mean()
    assert theirs.taid_loss(student, teacher, mask, 1.0).item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        theirs.taid_loss(student, teacher, mask, 1.1)
    scheduler, ours = theirs.TAIDScheduler(10), TaidSchedule()
    for step, loss in enumerate((2.0, 1.5, 1.0)):
        scheduler.update_t(torch.tensor(loss), global_step=step)
        ours.update(loss, step, 10)
    assert scheduler.t == ours.t > 0.4


def states(*names: str) -> list[theirs.TraceState]:
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    return [theirs.TraceState(name, messages, OTHER) for name in names]


def test_teachers_that_agree_against_the_student_make_a_pair_and_others_none() -> None:
    said = {
        "pair": {"a": CALL, "b": CALL, "c": OTHER},
        "with student": {"a": OTHER, "b": OTHER},
        "apart": {"a": CALL, "b": "I do not know."},
    }
    pairs = theirs.extract_dpo_pairs(states(*said), said)
    assert [(pair.state_id, pair.n_teachers_agreeing) for pair in pairs] == [("pair", 2)]
    assert (pairs[0].chosen, pairs[0].rejected) == (CALL, OTHER)
    with pytest.raises(ValueError, match="nothing for state 'x'"):
        theirs.extract_dpo_pairs(states("x"), said)


def test_filters_read_both_sides_and_a_pair_is_kept_once() -> None:
    messages = states("s")[0].messages
    good = theirs.DPOPair("s", messages, CALL, OTHER, 2)
    short = theirs.DPOPair("t", messages, CALL, "no", 2)
    normalizer = theirs.DJNormalizer()
    (kept,) = normalizer.normalize([good, short, good])
    assert kept.state_id == "s"
    assert kept.chosen_messages[0]["tool_calls"][0]["function"]["name"] == "calculator"
    assert kept.row()["prompt"] == messages
    assert normalizer.dropped["length"] == 1
    assert normalizer.dropped["exact_duplicates"] == 1
    assert normalizer.normalize([good]) == []


def test_one_call_asks_votes_and_filters_within_the_ceiling(toolbox: ToolboxTask) -> None:
    messages = SyncSession(toolbox, toolbox.episode("train", 0)).messages
    asked = [theirs.TraceState("s", messages, "I give up, there is no answer.")]
    provider = knowing(toolbox)
    with pytest.raises(ReplayRefused, match="no default ones"):
        theirs.replay_and_normalize_trace_sync(asked)
    (pair,) = theirs.replay_and_normalize_trace_sync(
        asked, paid("a", "b"), max_total_usd=1.0, environ=ENVIRON, transport=provider.transport
    )
    assert pair.chosen == toolbox.expert(messages)
    assert math.isclose(provider.charged, 2 * 0.0001 * 1e9)


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_its_trainer_logs_the_frameworks_figures(
    toolbox: ToolboxTask, tokenizer: Any, build_model: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    from trl_runs import last_log, make_trainer, pair_rows

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from composer_mesh.plugins.frameworks.trl.pairs import StoredPairs

    trainer = make_trainer(
        toolbox,
        tokenizer,
        build_model(1),
        tmp_path,
        base=theirs.ComposerReplicationTrainer,
        pairs=StoredPairs(pair_rows(toolbox), per_step=3),
    )
    trainer.train()
    log = last_log(trainer)
    total = log["loss/grpo"] + 0.1 * log["loss/sdpo_kl"] + 0.05 * log["loss/trace_replay_dpo"]
    assert log["loss/total"] == pytest.approx(total, abs=1e-6)
    assert log["loss/sdpo_kl"] > 0


PAGE = Guide.read("composer-replication.md")
THEIRS = {"token_clip", "grpo_composer", "loss_fn"}


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - THEIRS == set()


def test_every_name_of_the_module_is_in_the_page() -> None:
    for name in composer_replication.__all__:
        if name not in ("ComposeLossResult", "DPOPair", "NormalizedDPOPair"):
            assert name in PAGE.text, name


def test_the_python_of_the_page_runs(
    build_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    found: dict[str, Any] = {
        "model": build_model(1),
        "batch": {"input_ids": ids, "response_mask": torch.tensor([[0, 1, 1, 1]])},
    }
    for block in PAGE.blocks("python"):
        exec(block, found)
    assert found["rows"][0]["chosen"] == [{"role": "assistant", "content": "6 times 7 is 42."}]
    assert all(path.is_file() for path in found["recipes"])
