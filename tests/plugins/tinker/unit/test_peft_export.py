"""An archive's adapters are those that peft loads: the same logits as the trainer's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import (
    AdamParams,
    Datum,
    ModelSpec,
    ScoreRequest,
    TrainCall,
)
from composer_mesh.plugins.tinker.models.model_state import read_state
from composer_mesh.plugins.tinker.models.snapshots import SnapshotReader, scored
from composer_mesh.plugins.tinker.models.trained_weights import (
    AdapterLayout,
    AdapterWeights,
    peft_files,
)

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
