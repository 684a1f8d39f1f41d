"""The sampler of a server: diverged weights fail what is drawn from them, and nothing else.

Samples end with the token that completes a stop text. A served trainer reports its progress, as
every actor with long calls does. peft loads what was trained.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import ask
from in_process_host import InProcessActor

from composer_mesh.actors.engines.port import LogitsNotFinite
from composer_mesh.mesh.progress import PROGRESS, ProgressReport
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import (
    AdamParams,
    Datum,
    ModelSpec,
    ScoreRequest,
    TrainCall,
)
from composer_mesh.plugins.tinker.models.model_state import StoredState, read_state, write_state
from composer_mesh.plugins.tinker.models.snapshots import SnapshotReader, scored
from composer_mesh.plugins.tinker.models.trained_weights import (
    AdapterLayout,
    AdapterWeights,
    peft_files,
)
from composer_mesh.plugins.tinker.served_sampler import ServedSamplerActor
from composer_mesh.plugins.tinker.server.sampling_lane import cut_after
from composer_mesh.rollouts.generation import GenerationResult

SPEC = ModelSpec(rank=4, seed=1)


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


@pytest.fixture
async def sampler(build_config: Any, model: Any, tokenizer: Any, tmp_path: Path) -> InProcessActor:
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    actor = InProcessActor("sampler-0", 1, ServedSamplerActor(), asyncio.Lock())
    await actor.call("load", build_config(generator={"max_concurrent": 4}), tmp_path / "policy")
    return actor


def snapshot(model: Any, path: Path, scale: float) -> str:
    """Write adapters of random numbers."""
    total = AdapterLayout.of(model, SPEC).total
    numbers = torch.randn(total, generator=torch.Generator().manual_seed(0)) * scale
    write_state(path, StoredState(SPEC, 3, 3, {"weights": numbers}))
    return str(path)


async def test_weights_whose_logits_are_all_equal_are_sampled(
    sampler: InProcessActor, model: Any, tmp_path: Path
) -> None:
    """As after steps of a learning rate of 1e6."""
    numbers = torch.full((AdapterLayout.of(model, SPEC).total,), 1e6)
    write_state(tmp_path / "flat.safetensors", StoredState(SPEC, 3, 3, {"weights": numbers}))
    (found,) = await sampler.call(
        "sample", str(tmp_path / "flat.safetensors"), [ask("r", [5, 6], 4)]
    )
    assert len(set(found.logprobs)) == 1


@pytest.mark.parametrize("scale", [1e25, float("nan")])
async def test_diverged_weights_fail_what_is_drawn_from_them_and_no_other(
    sampler: InProcessActor, model: Any, tmp_path: Path, scale: float
) -> None:
    diverged = snapshot(model, tmp_path / "diverged.safetensors", scale)
    good = snapshot(model, tmp_path / "good.safetensors", 1e-3)
    asked = [[ask(f"{n}/{k}", [5, 6, 7 + k], 4) for k in range(3)] for n in range(2)]
    calls = [sampler.call("sample", one, asked[n]) for n, one in enumerate((good, ""))]
    found, failed = await asyncio.gather(
        asyncio.gather(*calls), sampler.call("sample", diverged, asked[0]), return_exceptions=True
    )
    assert not isinstance(found, BaseException)
    assert all(isinstance(one, GenerationResult) for one in [*found[0], *found[1]])
    assert isinstance(failed, LogitsNotFinite)
    assert "logits are not finite at version 0" in str(failed)
    with pytest.raises(LogitsNotFinite, match="logits are not finite"):
        await sampler.call("score", diverged, [[5, 6, 7]], ScoreRequest(2))
    (scores,) = await sampler.call("score", good, [[5, 6, 7]], ScoreRequest(2))
    assert np.isfinite(scores.logprobs).all()


def test_a_served_trainer_reports_each_batch_of_its_clients(build_model: Any) -> None:
    base = build_model(5)
    trainer = ClientTrainer(base, AdapterWeights(base, 32.0), 4096, 16)
    trainer.open("a", ModelSpec(rank=4, seed=1), None)
    inputs = {"target_tokens": np.full(9, 4), "weights": np.ones(9, np.float32)}
    data = (Datum(np.full(9, 3), inputs),)
    before = PROGRESS.count
    trainer.execute([TrainCall("a", 0, "forward_backward", data, "cross_entropy")])
    assert PROGRESS.count > before
    assert ProgressReport(**PROGRESS.report()).last == "a batch of 1 clients' rows"


def decode(ids: list[int]) -> str:
    return "".join("ab"[one] for one in ids)


def test_a_served_sample_ends_with_its_stop_text_and_has_a_logprob_for_each_token() -> None:
    result = GenerationResult("r", [0, 0, 1, 0], [-1.0, -2.0, -3.0, -4.0], [3, 3, 4, 5], "length")
    cut = cut_after(["ab"], result, decode)
    assert (cut.token_ids, cut.logprobs) == ([0, 0, 1], [-1.0, -2.0, -3.0])
    assert (cut.versions, cut.stop_reason) == ([3, 3, 4], "stop")
    assert cut_after(["zz"], result, decode) is result


ALPHA = 16.0


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_peft_and_the_sampler_compute_what_was_trained(build_model: Any, tmp_path: Path) -> None:
    import peft

    base = build_model(5)
    spec = ModelSpec(rank=4, seed=3)
    trainer = ClientTrainer(base, AdapterWeights(base, ALPHA), 4096, 4)
    trainer.open("a", spec, None)
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(3, 60, 9), rng.integers(3, 60, 9)
    datum = Datum(ids[:-1], {"target_tokens": ids[1:]})
    other = Datum(ids, {"target_tokens": targets})
    for step in range(2):
        call = TrainCall("a", 2 * step, "forward_backward", (other,), "cross_entropy")
        adam = TrainCall("a", 2 * step + 1, "optim_step", adam=AdamParams(0.02))
        assert not any(one.error for one in trainer.execute([call, adam]))
    (trained,) = trainer.execute([TrainCall("a", 4, "forward", (datum,), "cross_entropy")])
    trainer.save("a", tmp_path / "state", weights_only=True)

    sampler = SnapshotReader(build_model(5), ALPHA).read(str(tmp_path / "state"))
    found = scored(sampler.scoring, ids.tolist(), ScoreRequest(top_k=2))
    np.testing.assert_allclose(found.logprobs, trained.logprobs[0], atol=1e-5)
    assert found.top_ids is not None
    assert found.top_ids.shape == (8, 2)

    plain = build_model(5)
    stored = read_state(tmp_path / "state")
    files = peft_files(stored, AdapterLayout.of(plain, spec), "base", ALPHA)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    with torch.no_grad():
        logits = loaded(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    own = logits.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(own.numpy(), trained.logprobs[0], atol=1e-4)
