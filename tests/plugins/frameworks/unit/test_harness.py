"""The verification harness: three channels on any causal LM, each off for a stated reason."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from composer_mesh.plugins.frameworks.harness import ComposedLoss, compose_loss

VOCABULARY = 50
HINT = 3


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).double().eval()


def gpt2() -> Any:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    return GPT2LMHeadModel(config).double().eval()


@pytest.fixture(params=[llama, gpt2])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


def make_batch(rows: int = 3, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(VOCABULARY, shape, generator=generator)

    student, hint = ids(rows, length), ids(rows, HINT)
    response = torch.zeros(rows, length, dtype=torch.bool)
    response[:, 4:] = True
    batch = {
        "input_ids": student,
        "response_mask": response,
        "ctx_teacher_input_ids": torch.cat([student[:, :4], hint, student[:, 4:]], 1),
        "sdpo_loss_mask": response.clone(),
    }
    for side, width in (("chosen", 8), ("rejected", 6)):
        mask = torch.zeros(rows, width, dtype=torch.bool)
        mask[:, 3:] = True
        batch[f"dpo_{side}_input_ids"] = ids(rows, width)
        batch[f"dpo_{side}_response_mask"] = mask
        batch[f"dpo_{side}_ref_logprobs"] = -torch.rand(
            rows, generator=generator, dtype=torch.float64
        )
    return batch


def composed(model: Any, batch: dict[str, Tensor], **options: Any) -> ComposedLoss:
    return compose_loss(model, batch, **{"alpha_sdpo": 0.3, "beta_replay": 0.2, **options})


def sums(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    logprobs = torch.log_softmax(model(input_ids=ids).logits, -1)[:, :-1]
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    return (chosen * mask[:, 1:]).sum(-1)


def answers(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    chosen, rejected = (
        sums(model, batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"])
        for side in ("chosen", "rejected")
    )
    return chosen, rejected


def value(loss: Tensor | None) -> float:
    assert loss is not None
    return loss.item()


def test_the_total_is_the_weighted_sum_and_carries_the_gradient(model: Any) -> None:
    found = composed(model, make_batch())
    assert found.off == {}
    expected = value(found.lm_ce) + 0.3 * value(found.sdpo_jsd) + 0.2 * value(found.replay)
    assert found.total.item() == pytest.approx(expected, rel=1e-12)
    found.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lm_ce_is_the_models_own_loss_on_the_response(model: Any) -> None:
    batch = make_batch()
    labels = batch["input_ids"].masked_fill(~batch["response_mask"], -100)
    own = model(input_ids=batch["input_ids"], labels=labels).loss
    assert value(composed(model, batch).lm_ce) == pytest.approx(own.item(), rel=1e-6)


def test_the_divergence_compares_the_predictions_of_the_same_tokens(model: Any) -> None:
    batch = make_batch()
    student = torch.softmax(model(input_ids=batch["input_ids"]).logits, -1)[:, 3:-1]
    teacher = torch.softmax(model(input_ids=batch["ctx_teacher_input_ids"]).logits, -1)
    teacher = teacher[:, 3 + HINT : -1]
    mixture = (student + teacher) / 2
    terms = teacher * (teacher / mixture).log() + student * (student / mixture).log()
    expected = terms.sum(-1).mean() / 2
    assert value(composed(model, batch).sdpo_jsd) == pytest.approx(expected.item(), rel=1e-9)


def test_taid_at_0_is_the_students_entropy_and_at_1_the_cross_entropy(model: Any) -> None:
    batch = make_batch()
    student = torch.log_softmax(model(input_ids=batch["input_ids"]).logits, -1)[:, 3:-1]
    teacher = torch.softmax(model(input_ids=batch["ctx_teacher_input_ids"]).logits, -1)
    for t, target in ((0, student.exp()), (1, teacher[:, 3 + HINT : -1])):
        found = composed(model, batch, sdpo_wrapper="taid", taid_t=t)
        expected = -(target * student).sum(-1).mean()
        assert value(found.sdpo_jsd) == pytest.approx(expected.item(), rel=1e-9)


def test_the_entropy_gate_is_forward_kl_when_open_and_reverse_when_shut(model: Any) -> None:
    batch = make_batch()
    for h_max, beta in ((1e-9, 0), (1e9, 1)):
        gated = composed(model, batch, sdpo_wrapper="entropy_opd", entropy_opd_h_max=h_max)
        plain = composed(model, batch, jsd_beta=beta)
        assert value(gated.sdpo_jsd) == pytest.approx(value(plain.sdpo_jsd), rel=1e-6)


def test_the_variants_of_preference_are_their_formulas(model: Any) -> None:
    batch = make_batch()
    chosen, rejected = answers(model, batch)
    c = chosen - batch["dpo_chosen_ref_logprobs"]
    r = rejected - batch["dpo_rejected_ref_logprobs"]
    expected = {
        "dpo": -torch.nn.functional.logsigmoid(0.1 * (c - r)),
        "ipo": (c / 5 - r / 3 - 1 / 0.2) ** 2,
        "simpo": -torch.nn.functional.logsigmoid(2.0 * (chosen / 5 - rejected / 3) - 0.5),
    }
    for variant, losses in expected.items():
        found = composed(model, batch, dpo_variant=variant)
        assert value(found.replay) == pytest.approx(losses.mean().item(), rel=1e-9)


def test_reference_logprobs_may_stand_by_token(model: Any) -> None:
    batch = make_batch()
    by_token = dict(batch)
    for side in ("chosen", "rejected"):
        mask = batch[f"dpo_{side}_response_mask"]
        share = batch[f"dpo_{side}_ref_logprobs"] / mask.sum(-1)
        values = torch.where(mask, share[:, None], math.nan)
        by_token[f"dpo_{side}_ref_logprobs"] = values
    assert value(composed(model, by_token).replay) == pytest.approx(
        value(composed(model, batch).replay)
    )


def test_a_channel_without_weight_is_off_and_costs_no_forward(model: Any) -> None:
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = composed(model, make_batch(), alpha_sdpo=0, beta_replay=0)
    assert len(calls) == 1
    assert (found.sdpo_jsd, found.replay) == (None, None)
    assert found.off == {"sdpo_jsd": "alpha_sdpo is 0", "replay": "beta_replay is 0"}
    assert found.total.item() == value(found.lm_ce)


@pytest.mark.parametrize(
    ("missing", "channel", "field"),
    [
        ("response_mask", "lm_ce", "lm_ce"),
        ("ctx_teacher_input_ids", "sdpo_jsd", "sdpo_jsd"),
        ("sdpo_loss_mask", "sdpo_jsd", "sdpo_jsd"),
        ("dpo_rejected_ref_logprobs", "replay", "replay"),
    ],
)
def test_a_channel_without_inputs_is_off_and_says_which(
    model: Any, missing: str, channel: str, field: str
) -> None:
    batch = make_batch()
    del batch[missing]
    found = composed(model, batch)
    assert found.off == {channel: f"the batch has no {missing}"}
    assert getattr(found, field) is None


def test_simpo_asks_for_no_reference(model: Any) -> None:
    batch = make_batch()
    del batch["dpo_chosen_ref_logprobs"], batch["dpo_rejected_ref_logprobs"]
    assert composed(model, batch, dpo_variant="simpo").off == {}


def test_microbatches_add_up_under_the_normalizers_of_the_whole(model: Any) -> None:
    batch = make_batch(rows=4)
    whole = composed(model, batch)
    counts = {"lm_ce": 20, "sdpo_jsd": 20, "replay": 4}
    halves = [
        composed(model, {key: part[rows] for key, part in batch.items()}, normalizers=counts)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    total = torch.stack([half.total for half in halves]).sum()
    assert total.item() == pytest.approx(whole.total.item(), rel=1e-9)


def test_no_gradient_flows_through_the_teacher(model: Any) -> None:
    """With the response distilled onto itself, only the student's side could move anything."""
    batch = make_batch()
    batch["ctx_teacher_input_ids"] = batch["input_ids"]
    only = {key: batch[key] for key in ("input_ids", "ctx_teacher_input_ids", "sdpo_loss_mask")}
    found = composed(model, only)
    assert value(found.sdpo_jsd) == pytest.approx(0, abs=1e-12)
    found.total.backward()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.abs().max().item() < 1e-12


def test_a_mask_on_the_teachers_side_aligns_rows_padded_differently(model: Any) -> None:
    batch = make_batch()
    expected = value(composed(model, batch).sdpo_jsd)
    teacher = batch["ctx_teacher_input_ids"]
    batch["ctx_teacher_input_ids"] = torch.cat([teacher, torch.zeros_like(teacher[:, :2])], 1)
    with pytest.raises(ValueError, match="row 0 marks 5 tokens"):
        composed(model, batch)
    mask = torch.zeros_like(batch["ctx_teacher_input_ids"], dtype=torch.bool)
    mask[:, 4 + HINT : -2] = True
    batch["ctx_teacher_loss_mask"] = mask
    assert value(composed(model, batch).sdpo_jsd) == pytest.approx(expected)


def test_masks_of_0_and_1_are_masks_and_labels_are_not(model: Any) -> None:
    batch = make_batch()
    expected = composed(model, batch).total.item()
    batch["response_mask"] = batch["response_mask"].long()
    assert composed(model, batch).total.item() == expected
    batch["sdpo_loss_mask"] = batch["input_ids"].masked_fill(~batch["sdpo_loss_mask"], -100)
    with pytest.raises(ValueError, match="labels != -100"):
        composed(model, batch)


def test_empty_masks_give_0_with_a_graph(model: Any) -> None:
    batch = make_batch()
    for key in ("response_mask", "sdpo_loss_mask"):
        batch[key] = torch.zeros_like(batch[key])
    found = composed(model, batch, beta_replay=0)
    found.total.backward()
    assert found.total.item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sdpo_wrapper": "opd"}, "sdpo_wrapper is 'opd'"),
        ({"sdpo_wrapper": "taid"}, "taid_t is None"),
        ({"dpo_variant": "kto"}, "dpo_variant is 'kto'"),
        ({"alpha_sdpo": -1}, "weight of sdpo is -1"),
    ],
)
def test_bad_options_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    # Past the type checks of the tests, which would complain first.
    unchecked = inspect.unwrap(compose_loss)
    with pytest.raises(ValueError, match=message):
        unchecked(model, make_batch(), **{"alpha_sdpo": 0.3, "beta_replay": 0.2, **options})
