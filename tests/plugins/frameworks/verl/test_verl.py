"""verl itself: its recorded names, our step in its FSDP2 engine, episodes by its agent loops."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from process_trees import run_tree

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent
RECORDED = HERE.parent / "unit" / "recorded" / "verl.json"
LOSSES = ("loss/policy", "loss/sdpo", "loss/replay", "loss/total")


def printed(script: str, policy: Path, ranks: int = 1) -> Any:
    """What a script prints in processes of its own, since the platform is chosen at import."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = run_tree(
        [sys.executable, *(launch if ranks > 1 else []), str(HERE / script), str(policy)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return next(json.loads(one) for one in ended.stdout.splitlines() if one.startswith("{"))


@pytest.fixture(scope="module", params=[1, 2])
def trained(policy: Path, request: pytest.FixtureRequest) -> Any:
    """What `engine_steps.py` found, on one rank and on two."""
    return printed("engine_steps.py", policy, request.param)


def test_a_step_in_its_engine_has_the_losses_and_the_weights_of_ours(trained: Any) -> None:
    first, ours = trained["steps"][0], trained["ours"]
    for name in LOSSES:
        assert first[name] == pytest.approx(ours[name], abs=1e-5), name
        assert first[name] != 0
    assert trained["difference"] < 1e-5


def test_the_losses_of_three_steps_fall(trained: Any) -> None:
    totals = [one["loss/total"] for one in trained["steps"]]
    assert totals == sorted(totals, reverse=True)
    assert len(totals) == 3


def test_a_teacher_of_its_likeliest_entries_and_pairs_alone_train(trained: Any) -> None:
    assert 0 < trained["top_k"]["loss/sdpo"] < trained["steps"][0]["loss/sdpo"]
    first, second = (one["loss/replay"] for one in trained["pairs"])
    assert second < first


def test_its_agent_loops_play_episodes_that_three_steps_are_trained_on(policy: Path) -> None:
    found = printed("played_steps.py", policy)
    assert found["rewards"] == pytest.approx([0.9, 0.0, 0.9, 0.0])
    assert found["success"] == [True, False, True, False]
    assert found["views"] == [1, 1, 1, 1], "an unknown tool, and a wrong answer"
    good, bad = found["advantages"][:2]
    assert good == pytest.approx(-bad) == pytest.approx(0.7070, abs=1e-3)
    sdpo = [one["loss/sdpo"] for one in found["steps"]]
    assert len(sdpo) == 3
    assert all(one > 0 for one in sdpo)


def test_the_entry_point_has_registered_every_name() -> None:
    import verl  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    assert get_adv_estimator_fn("grpo_composer").__module__.startswith("composer_mesh")
    for name in ("composer_grpo", "composer_cispo", "composer_dppo"):
        assert get_policy_loss_fn(name).__module__.startswith("composer_mesh")
    assert "composer_mesh" in _agent_loop_registry


def test_the_recorded_names_are_those_of_the_release() -> None:
    from verl.experimental.agent_loop import agent_loop
    from verl.trainer.distillation import losses as distillation
    from verl.trainer.ppo import core_algos
    from verl.utils import tensordict_utils
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.utils import losses, padding

    models = (agent_loop.AgentLoopOutput, agent_loop.AgentLoopMetrics, TokenOutput)
    called = {
        "AgentLoopBase.__init__": agent_loop.AgentLoopBase.__init__,
        "AgentLoopBase.run": agent_loop.AgentLoopBase.run,
        "generate": LLMServerClient.generate,
        "compute_policy_loss_vanilla": core_algos.compute_policy_loss_vanilla,
        "compute_grpo_vectorized_outcome_advantage": (
            core_algos.compute_grpo_vectorized_outcome_advantage
        ),
        "agg_loss": core_algos.agg_loss,
        "ppo_loss": losses.ppo_loss,
        "distillation_ppo_loss": distillation.distillation_ppo_loss,
        "no_padding_2_padding": padding.no_padding_2_padding,
        "get_tensordict": tensordict_utils.get_tensordict,
        "forward_backward_batch": FSDPEngine.forward_backward_batch,
        "infer_batch": FSDPEngine.infer_batch,
    }
    found = {
        "version": "0.9.1",
        "fields": {one.__name__: list(one.model_fields) for one in models},
        "functions": {
            name: list(inspect.signature(one).parameters) for name, one in called.items()
        },
    }
    assert found == json.loads(RECORDED.read_text()), json.dumps(found)
