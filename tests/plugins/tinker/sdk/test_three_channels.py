"""The three-channel step through the SDK is the trainer's own; the example learns the toolbox."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served_process import ROOT, Sdk, Server, run_script
from step_batches import batch_of
from three_channel_steps import ON, TopKTeacher, client_step

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config
from composer_mesh.plugins.tinker.models.model_state import read_state

NEWEST = "0.38.0"


def lines_of(step: Any) -> str:
    """Return a client's step as a line that `three_channels.py` reads."""
    places = {id(one): n for n, one in enumerate(step.rollouts)}
    rollouts = [
        ([(list(t.context), list(t.action), list(t.logprobs)) for t in one.turns], one.advantage)
        for one in step.rollouts
    ]
    hinted = [
        (
            places[id(one.rollout)],
            asdict(one.view),
            one.teacher.ids.tolist(),
            one.teacher.logprobs.tolist(),
        )
        for one in step.hinted
    ]
    pairs = [
        (one.context, one.chosen, one.rejected, one.chosen_logprobs, one.rejected_logprobs)
        for one in step.pairs
    ]
    return json.dumps({"rollouts": rollouts, "hinted": hinted, "pairs": pairs})


@pytest.mark.parametrize("how", ["own", "public"])
def test_five_steps_through_the_sdk_are_those_of_the_trainer(
    sdk: Sdk, serve: Callable[..., Server], tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "policy"
    config = load_config(ROOT / "configs" / "quickstart.toml")
    words = ["".join(chr(97 + n * k % 26) for k in range(8)) for n in range(300)]
    tokenizer = policy.build_tokenizer(words * 4, 400)
    assert len(tokenizer) >= 300
    policy.save_policy(policy.build_model(config.policy, tokenizer, 1), tokenizer, folder)
    reference, model, hinting = (policy.load_model(folder) for _ in range(3))
    sections = {
        "trainer": config.trainer.model_copy(
            update={"lr": 3e-4, "grad_clip": 0.05, "lr_schedule": "constant", "warmup_steps": 0}
        ),
        "sdpo": config.sdpo.model_copy(update=ON["sdpo"]),
        "replay": config.replay.model_copy(update={"beta": 0.3}),
    }
    own = OptimizerStep(model, None, config.model_copy(update=sections))
    rng, lines, expected = random.Random(3), [], []
    for number in range(5):
        batch = replace(batch_of(reference, rng, samples=6, pairs=4), step=number)
        teacher = TopKTeacher(hinting, batch.views)
        lines.append(lines_of(client_step(batch, teacher, reference)))
        expected.append(own.run(batch, teacher))
    (tmp_path / "steps.jsonl").write_text("\n".join(lines))
    server = serve(f"policy.path={folder}", "serve.full_weights=true")
    script = run_script(
        sdk(NEWEST), "three_channels.py", server.url, str(tmp_path / "steps.jsonl"), how
    )
    told, _ = script.communicate(timeout=300)
    assert script.returncode == 0
    *found, saved = map(json.loads, told.splitlines())
    for theirs, mine in zip(found, expected, strict=True):
        assert theirs["grad_norm"] == pytest.approx(mine["policy/grad_norm"], rel=1e-4)
        for name in ("policy", "sdpo", "replay"):
            assert theirs[f"loss/{name}:sum"] == pytest.approx(mine[f"loss/{name}"], abs=1e-5)
    assert saved["path"]
    (file,) = (server.output / "saved").glob("*.safetensors")
    numbers = read_state(file).tensors["weights"]
    trained = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    assert float((numbers - trained).abs().max()) < 1e-5
    server.stop()


def test_the_example_learns_the_toolbox_through_the_sdk(
    sdk: Sdk, serve: Callable[..., Server]
) -> None:
    server = serve()
    command = [str(sdk(NEWEST)), "examples/tinker_toolbox/train.py", server.url, "--steps", "12"]
    keys = {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0", "PYTHONPATH": "src"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **keys}, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stderr
    *steps, last = map(json.loads, done.stdout.splitlines())
    print(last)
    assert sum(one["hints"] for one in steps) > 0
    assert sum(one["pairs"] for one in steps) > 0
    assert {"loss/policy:sum", "loss/sdpo:sum", "loss/replay:sum"} <= {*steps[0]}
    assert last["after"] > last["before"]
    server.stop()
