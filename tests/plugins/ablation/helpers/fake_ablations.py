"""Runs of an ablation that are fakes: they write what a run writes, and train nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.store.writing import RunStore


@dataclass
class FakeRuns:
    """Trains by writing what a run writes; success rises faster with every channel that is on."""

    ends: dict[int, int] = field(default_factory=dict)
    """The exit status of the n-th run that is asked for, where it is not 0."""
    trained: list[Path] = field(default_factory=list)
    resumed: list[Path] = field(default_factory=list)

    def __call__(self, config: Config, place: Path, resumed: Any = None) -> int:
        self.trained.append(place)
        if resumed is not None:
            self.resumed.append(place)
        code = self.ends.get(len(self.trained), 0)
        with RunStore(place, config) as store:
            store.add_event("run_started")
            for step in range(0, config.run.steps + 1, config.eval.every):
                if code and step == config.run.steps:
                    break
                store.add_evaluation(Evaluation(step, success(config, step), 20))
            if code:
                store.add_event("run_failed" if code == 1 else "run_stopped", "", "trainer died")
        return code


class PricedRuns(FakeRuns):
    """Runs that also write what they took: 100 tokens and 2 s a step, 3 dollars of providers."""

    def __call__(self, config: Config, place: Path, resumed: Any = None) -> int:
        code = super().__call__(config, place, resumed)
        lines = [{"step": n + 1, "tokens/trained": 100, "time/step_s": 2.0} for n in range(4)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / "metrics.jsonl").write_text(text)
        paid = {"replay": {"usd": 2.0, "pairs": 4}, "hints": {"usd": 0.75}, "judges": {"usd": 0.25}}
        summary = {"wall_s": 9.0, **paid}
        (place / "summary.json").write_text(json.dumps(summary))
        return code


def success(config: Config, step: int) -> float:
    channels = config.sdpo.on + config.replay.on
    return min(1.0, 0.2 + 0.1 * step * (1 + channels) + 0.05 * config.run.seed)
