"""Sends the steps of a file through the SDK, and prints the losses and norms that come back.

Each line is a step: rollouts, hinted turns with their teachers' ids, pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from acceptance import done
from tinker import types

from composer_mesh.plugins.tinker.client.sequences import (
    Hinted,
    Pair,
    Rollout,
    TeacherTopK,
    ThreeChannelStep,
    Turn,
)
from composer_mesh.plugins.tinker.client.step import submit, submit_public
from composer_mesh.rollouts.alignment import HintedView


def step_of(line: Any) -> ThreeChannelStep:
    rollouts = [Rollout([Turn(*turn) for turn in turns], own) for turns, own in line["rollouts"]]
    hinted = []
    for place, view, ids, logprobs in line["hinted"]:
        teacher = TeacherTopK(np.array(ids), np.array(logprobs, np.float32))
        hinted.append(Hinted(rollouts[place], HintedView(**view), teacher))
    pairs = [Pair(*one) for one in line["pairs"]]
    return ThreeChannelStep(rollouts, hinted, pairs, alpha=0.5, beta=0.3)


def main(url: str, file: str, how: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    training = done(service.create_lora_training_client("quickstart", rank=8, seed=1))
    adam = types.AdamParams(learning_rate=3e-4, eps=1e-8, grad_clip_norm=0.05)
    for line in Path(file).read_text().splitlines():
        step = step_of(json.loads(line))
        sent = submit(training, step) if how == "own" else submit_public(training, step)
        stepped = training.optim_step(adam)
        found: dict[str, float] = {}
        for one in sent if isinstance(sent, list) else [sent]:
            metrics = dict(one.result().metrics)
            # The public policy loss is alone in its request, and has no name of a channel.
            if (
                how == "public"
                and "loss/sdpo:sum" not in metrics
                and "loss/replay:sum" not in metrics
            ):
                metrics = {"loss/policy:sum": metrics["loss:sum"]}
            found |= metrics
        found["grad_norm"] = stepped.result().metrics["grad_norm"]
        print(json.dumps(found), flush=True)
    print(json.dumps({"path": training.save_state("end").result().path}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
