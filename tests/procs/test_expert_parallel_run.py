"""A run whose ranks divide a mixture's experts gives its generators the weights that they train."""

from __future__ import annotations

from pathlib import Path

import counted_letters
import torch
from live_run import launched
from model_families import family_folder

from composer_mesh.actors.models.policy import build_tokenizer, load_model
from composer_mesh.rollouts.traces import Trace

STEPS = 3
BOUND = 1e-4
"""Nats, in float32: one rank and two, one token and many at once, add in other orders."""


@torch.no_grad()
def apart(folder: Path, traces: list[Trace]) -> float:
    """The largest difference of a sampled log-prob from that of a folder's model."""
    model, largest = load_model(folder), 0.0
    for trace in traces:
        ids = torch.tensor([trace.token_ids()])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        at = 0
        for turn in trace.turns:
            at += len(turn.context_ids)
            end = at + len(turn.action_ids)
            found = own[at - 1 : end - 1] - torch.tensor(turn.logprobs)
            largest, at = max(largest, float(found.abs().max())), end
    return largest


def test_generators_sample_with_the_weights_that_ranks_with_divided_experts_trained(
    tmp_path: Path, policy_cache: Path
) -> None:
    torch.manual_seed(1)
    tokenizer = build_tokenizer(["use the tool"] * 9, 300)
    folder = family_folder("qwen3_moe", tokenizer, tmp_path / "mixture", num_experts=8)
    settings = {
        "run.steps": STEPS,
        "data.task": f"{counted_letters.__file__}:CountedLetters",
        "policy.path": folder,
        "schedule.max_lag": 0,
        "generator.replicas": 2,
        "generator.max_new_tokens": 20,
        "trainer.ranks": 2,
        "trainer.expert_parallel": 2,
        "trainer.lr": 0.01,
        "trainer.moe.load_balancing": 0.1,
        "trainer.checkpoint_every": 1,
        "trainer.checkpoints_kept": STEPS,
        "sdpo.alpha": 0,
        "replay.beta": 0,
        "eval.episodes": 2,
    }
    with launched(tmp_path / "run", policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
    steps = run.objects("metrics.jsonl")
    assert [step["policy_version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["logprob_mismatch/same_version/max"] < BOUND
        assert step["lag/max"] == 0
    traces = run.traces()
    for version in range(STEPS):
        own = [one for one in traces if one.turns[0].versions[0] == version]
        checkpoint = run.root / "checkpoints" / f"step-{version}" if version else folder
        assert own
        assert apart(checkpoint, own) < BOUND
        assert not version or apart(folder, own) > 100 * BOUND
