"""Operations of clients on their models: losses, gradients, steps, batches of several models.

The rows of a batch are divided among ranks by its shape alone, and put together again.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.plugins.tinker.models.batches import (
    MODELS,
    ROWS,
    Shares,
    TokenLimit,
    microbatches,
)
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import (
    AdamParams,
    BatchShape,
    Datum,
    ModelNotOpen,
    ModelSpec,
    TrainCall,
    TrainResult,
)
from composer_mesh.plugins.tinker.models.trained_weights import AdapterWeights, FullWeights

SPEC = ModelSpec(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)


def make_trainer(base: Any, most_tokens: int = 4096) -> ClientTrainer:
    return ClientTrainer(base, AdapterWeights(base, 32.0), most_tokens, 16)


def datum(seed: int, length: int = 9, k: int = 0, **extra: float) -> Datum:
    rng = np.random.default_rng(seed)
    shape = (length, k) if k else (length,)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(3, 60, shape)}
    inputs["weights"] = rng.normal(size=shape).astype(np.float32)
    inputs |= {name: np.full(length, value, np.float32) for name, value in extra.items()}
    return Datum(rng.integers(3, 60, length), inputs)


def train_call(
    model: str, position: int, *data: Datum, kind: Any = "forward_backward"
) -> TrainCall:
    return TrainCall(model, position, kind, data, "cross_entropy")


def step_call(model: str, position: int) -> TrainCall:
    return TrainCall(model, position, "optim_step", adam=ADAM)


def weights_of(trainer: ClientTrainer, model: str) -> torch.Tensor:
    return trainer.models[model].weights.detach().clone()


@pytest.fixture(scope="module")
def base(build_model: Any) -> Any:
    return build_model(5)


def run_steps(trainer: ClientTrainer, model: str, steps: int, first: int = 0) -> list[TrainResult]:
    found: list[TrainResult] = []
    for step in range(steps):
        position = 2 * (first + step)
        data = [datum(100 * (first + step) + n, 6 + n) for n in range(3)]
        calls = [train_call(model, position, *data), step_call(model, position + 1)]
        found += trainer.execute(calls)
    return found


def test_logprobs_are_those_of_the_model_and_new_adapters_change_nothing(base: Any) -> None:
    trainer, one = make_trainer(base), datum(3, 11)
    trainer.open("a", SPEC, None)
    (result,) = trainer.execute([train_call("a", 0, one, kind="forward")])
    logits = base(input_ids=torch.from_numpy(one.tokens)[None]).logits[0].log_softmax(-1)
    targets = torch.from_numpy(one.inputs["target_tokens"])[:, None]
    torch.testing.assert_close(
        torch.from_numpy(result.logprobs[0]), logits.gather(1, targets)[:, 0]
    )
    assert result.metrics["loss:sum"] == pytest.approx(
        -float((result.logprobs[0] * one.inputs["weights"]).sum()), rel=1e-5
    )
    assert trainer.models["a"].position == 0


def test_several_targets_a_token_are_scored_at_once(base: Any) -> None:
    trainer, many = make_trainer(base), datum(4, 7, k=3)
    trainer.open("a", SPEC, None)
    (result,) = trainer.execute([train_call("a", 0, many, kind="forward")])
    for k in range(3):
        one = Datum(many.tokens, {"target_tokens": many.inputs["target_tokens"][:, k]})
        (alone,) = trainer.execute([train_call("a", 0, one, kind="forward")])
        np.testing.assert_allclose(result.logprobs[0][:, k], alone.logprobs[0], atol=1e-5)


def test_gradients_of_several_calls_and_of_microbatches_add_up(base: Any) -> None:
    data = [datum(n, 5 + n) for n in range(4)]
    apart, together, cut = make_trainer(base), make_trainer(base), make_trainer(base, 16)
    for trainer in (apart, together, cut):
        trainer.open("a", SPEC, None)
    apart.execute([train_call("a", n, one) for n, one in enumerate(data)])
    together.execute([train_call("a", 0, *data)])
    cut.execute([train_call("a", 0, *data)])
    for other in (together, cut):
        torch.testing.assert_close(
            other.models["a"].gradient, apart.models["a"].gradient, atol=1e-5, rtol=1e-4
        )


def test_a_model_trained_beside_others_equals_one_trained_alone(base: Any) -> None:
    alone, beside = make_trainer(base), make_trainer(base)
    alone.open("a", SPEC, None)
    for name in ("x", "a", "y"):
        beside.open(name, SPEC, None)
    for step in range(3):
        mine = [datum(10 * step + n, 7) for n in range(2)]
        others = [train_call(name, 2 * step, datum(999 + step, 8)) for name in ("x", "y")]
        alone.execute([train_call("a", 2 * step, *mine), step_call("a", 2 * step + 1)])
        results = beside.execute(
            [others[0], train_call("a", 2 * step, *mine), others[1]]
            + [step_call(name, 2 * step + 1) for name in ("x", "a", "y")]
        )
        assert results[1].shape is not None
        assert results[1].shape.models == 3
    torch.testing.assert_close(
        weights_of(beside, "a"), weights_of(alone, "a"), atol=1e-5, rtol=1e-4
    )


def test_a_call_repeated_in_its_shape_gives_the_same_bits_without_the_others(base: Any) -> None:
    first, again = make_trainer(base), make_trainer(base)
    names = ("x", "a", "y", "z")
    for name in names:
        first.open(name, ModelSpec(4, seed=len(name) + ord(name[0])), None)
    again.open("a", first.models["a"].spec, None)
    for step in range(3):
        calls = [train_call(n, 2 * step, datum(step * 10 + ord(n[0]), 9)) for n in names]
        results = first.execute([*calls, *(step_call(n, 2 * step + 1) for n in names)])
        shape = results[1].shape
        assert shape is not None
        assert (shape.models, shape.place) == (4, 1)
        mine = calls[1]
        replayed = again.execute(
            [
                TrainCall("a", mine.position, mine.kind, mine.data, mine.loss, shape=shape),
                step_call("a", 2 * step + 1),
            ]
        )
        np.testing.assert_array_equal(replayed[0].logprobs[0], results[1].logprobs[0])
    assert torch.equal(weights_of(again, "a"), weights_of(first, "a"))


def test_a_restored_model_goes_on_bit_for_bit(base: Any, tmp_path: Path) -> None:
    whole, begun = make_trainer(base), make_trainer(base)
    whole.open("a", SPEC, None)
    begun.open("a", SPEC, None)
    run_steps(whole, "a", 4)
    run_steps(begun, "a", 2)
    begun.execute([train_call("a", 4, *[datum(200 + n, 6 + n) for n in range(3)])])
    begun.save("a", tmp_path / "state")
    other = make_trainer(base)
    assert other.open("a", SPEC, tmp_path / "state") == 5
    other.execute([step_call("a", 5)])
    run_steps(other, "a", 1, first=3)
    assert torch.equal(weights_of(other, "a"), weights_of(whole, "a"))


def test_a_step_is_that_of_adamw(base: Any) -> None:
    trainer = make_trainer(base)
    trainer.open("a", SPEC, None)
    before = weights_of(trainer, "a")
    trainer.execute([train_call("a", 0, datum(1))])
    gradient = trainer.models["a"].gradient
    assert gradient is not None
    norm = float(gradient.norm())
    clip = norm / 2
    adam = AdamParams(0.01, 0.9, 0.95, 1e-8, 0.1, clip)
    (result,) = trainer.execute([TrainCall("a", 1, "optim_step", adam=adam)])
    expected = torch.nn.Parameter(before.clone())
    optimizer = torch.optim.AdamW(
        [expected], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    expected.grad = gradient / 2
    optimizer.step()
    torch.testing.assert_close(weights_of(trainer, "a"), expected.detach())
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing_and_harms_no_other(base: Any) -> None:
    trainer = make_trainer(base)
    for name in ("a", "b"):
        trainer.open(name, SPEC, None)
    bad = datum(1)
    bad.inputs["weights"][2] = np.nan
    results = trainer.execute([train_call("a", 0, bad), train_call("b", 0, datum(1))])
    assert "not finite" in results[0].error
    assert not results[1].error
    assert trainer.models["a"].gradient is None
    assert trainer.models["a"].position == 0
    assert trainer.models["b"].gradient is not None
    assert trainer.models["b"].position == 1


def test_a_call_at_another_position_is_not_executed(base: Any) -> None:
    trainer = make_trainer(base)
    trainer.open("a", SPEC, None)
    trainer.execute([train_call("a", 0, datum(1))])
    for calls in ([train_call("a", 0, datum(1))], [step_call("a", 2)], [step_call("gone", 0)]):
        with pytest.raises(ModelNotOpen):
            trainer.execute(calls)
    assert trainer.models["a"].position == 1


def test_weights_of_another_shape_are_refused_by_name(base: Any, tmp_path: Path) -> None:
    trainer = make_trainer(base)
    trainer.open("a", SPEC, None)
    trainer.open("b", ModelSpec(rank=2), None)
    trainer.save("b", tmp_path / "b", weights_only=True)
    (result,) = trainer.execute([TrainCall("a", 0, "load_weights", path=str(tmp_path / "b"))])
    assert "rank=2" in result.error
    assert "rank=4" in result.error
    (tmp_path / "junk").write_bytes(b"\x00" * 64)
    (result,) = trainer.execute([TrainCall("a", 0, "load_weights", path=str(tmp_path / "junk"))])
    assert "no state" in result.error
    assert trainer.models["a"].position == 0


def test_all_weights_of_one_model_are_trained(build_model: Any) -> None:
    base = build_model(6)
    weights = FullWeights(base, Ranks())
    trainer = ClientTrainer(base, weights, 4096, 16)
    trainer.open("a", ModelSpec(rank=0), None)
    one = datum(3, 11)
    (result,) = trainer.execute([train_call("a", 0, one)])
    logits = base(input_ids=torch.from_numpy(one.tokens)[None]).logits[0].log_softmax(-1)
    targets = torch.from_numpy(one.inputs["target_tokens"])[:, None]
    own = logits.gather(1, targets)[:, 0]
    torch.testing.assert_close(torch.from_numpy(result.logprobs[0]), own.detach())
    (-(own * torch.from_numpy(one.inputs["weights"])).sum()).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in base.parameters()])
    torch.testing.assert_close(trainer.models["a"].gradient, expected, atol=1e-5, rtol=1e-4)
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    trainer.execute([step_call("a", 1)])
    assert all(torch.equal(p, before[name]) for name, p in base.named_parameters())
    assert not torch.equal(weights_of(trainer, "a"), weights.initial(ModelSpec(0)))


def test_sequences_with_other_numbers_of_targets_do_not_change_each_other(base: Any) -> None:
    trainer = make_trainer(base)
    trainer.open("a", SPEC, None)
    one, many = datum(1, 9), datum(2, 8, k=3)
    for each in (one, many):
        del each.inputs["weights"]  # type: ignore[attr-defined]
    apart = [trainer.execute([train_call("a", 0, d, kind="forward")])[0] for d in (one, many)]
    (both,) = trainer.execute([train_call("a", 0, one, many, kind="forward")])
    assert [x.shape for x in both.logprobs] == [(9,), (8, 3)]
    expected = sum(result.metrics["loss:sum"] for result in apart)
    assert both.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_an_unexpected_failure_of_one_models_data_harms_no_other(base: Any) -> None:
    trainer = make_trainer(base)
    for name in ("a", "b"):
        trainer.open(name, SPEC, None)
    broken = datum(1)
    broken.inputs["weights"] = np.zeros(40, np.float32)  # type: ignore[index]
    results = trainer.execute([train_call("a", 0, broken), train_call("b", 0, datum(1))])
    assert "the trainer failed" in results[0].error
    assert not results[1].error
    assert [trainer.models[name].position for name in ("a", "b")] == [0, 1]
    assert trainer.models["a"].gradient is None


def test_targets_of_one_column_are_those_without(base: Any) -> None:
    trainer, flat = make_trainer(base), datum(3)
    column = Datum(flat.tokens, {name: one[:, None] for name, one in flat.inputs.items()})
    trainer.open("a", SPEC, None)
    found = [
        trainer.execute([train_call("a", 0, one, kind="forward")])[0] for one in (flat, column)
    ]
    assert not found[1].error
    assert found[0].metrics == found[1].metrics
    assert found[1].logprobs[0].shape == (9, 1)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
def test_diverged_weights_of_one_model_change_no_bit_of_anothers_gradient(
    base: Any, broken: float
) -> None:
    gradients = []
    for value in (0.0, broken):
        trainer = make_trainer(base)
        for name in ("a", "b"):
            trainer.open(name, SPEC, None)
        trainer.models["a"].weights.data += value
        calls = [train_call("a", 0, datum(1)), train_call("b", 0, datum(2))]
        failed, fine = trainer.execute(calls)
        assert bool(failed.error) == bool(value)
        assert not fine.error
        assert trainer.models["a"].position == int(not value)
        assert fine.shape is not None
        assert fine.shape.models == 2
        gradients.append(trainer.models["b"].gradient)
    assert torch.equal(*gradients)


SIZES = st.integers(1, 7)


@given(SIZES, SIZES, st.integers(1, 5))
def test_the_shares_of_all_ranks_are_the_batch(models: int, rows: int, ranks: int) -> None:
    shape = BatchShape(models, 0, rows, 3)
    shares = Shares.of(shape, ranks)
    batch = torch.arange(1, models * rows * 3 + 1).view(models * rows, 3)
    parts = [shares.cut(batch, rank) for rank in range(ranks)]
    assert torch.equal(shares.joined(parts), batch)
    for part in parts:
        assert len(part) == shares.part.models * shares.part.rows
    kept = torch.cat(parts).flatten()
    assert torch.equal(kept[kept > 0].sort().values, batch.flatten())


@given(SIZES, SIZES, st.integers(1, 5))
def test_a_model_is_where_its_rows_are(models: int, rows: int, ranks: int) -> None:
    shape = BatchShape(models, 0, rows, 1)
    shares = Shares.of(shape, ranks)
    batch = torch.arange(models).repeat_interleave(rows)[:, None] + 1
    for rank in range(ranks):
        own = shares.cut(batch, rank).view(shares.part.models, shares.part.rows)
        for place, its_rows in zip(shares.models_of(rank), own, strict=True):
            assert set(its_rows.tolist()) <= {0, place + 1}


@pytest.mark.parametrize(
    ("models", "rows", "axis", "tokens"),
    [(1, 1, ROWS, 8), (1, 5, ROWS, 24), (8, 1, MODELS, 32), (3, 4, ROWS, 48), (4, 3, MODELS, 48)],
)
def test_the_axis_with_the_least_padding_is_divided(
    models: int, rows: int, axis: int, tokens: int
) -> None:
    shares = Shares.of(BatchShape(models, 0, rows, 8), 2)
    assert (shares.axis, shares.tokens) == (axis, tokens)


def test_a_microbatch_is_as_large_as_each_rank_allows() -> None:
    ids = torch.zeros(8, dtype=torch.long).numpy()
    data = tuple(Datum(ids, {"target_tokens": ids}) for _ in range(7))
    call = TrainCall("a", 0, "forward", data, "cross_entropy")
    for ranks, sizes in ((1, [2, 2, 2, 1]), (2, [4, 3]), (3, [6, 1])):
        parts = microbatches(call, BatchShape(1, 0, 7, 8), TokenLimit(16, ranks))
        assert [len(one) for one in parts] == sizes
