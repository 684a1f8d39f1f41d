"""What a run will take, and whether its rewards teach anything: read off the metrics of its steps.

Knows neither actors nor clocks: durations are passed to it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.report import duration, has_policy_gradient

FLAT_STEPS = 5
"""Steps in a row without a policy gradient after which a run is warned.

With 8 groups a step of which one in ten has mixed rewards, five flat steps by chance alone are one
case in seventy.
"""
REPAIR = (
    "raise schedule.group_size or generator.temperature, train on easier episodes "
    "([data.curriculum]), or fine-tune first: composer-mesh sft"
)


COMPARED = 16
"""Compared actions after which a run is warned of a hinted teacher that is no better.

Where it is as good as the student, it is behind at half of them or more.
"""
REPAIR_HINTS = (
    "teach the policy to read hints ([sft] hinted_share), take hints from elsewhere "
    "(sdpo.hints.sources), or let the channel rest while it does not help (sdpo.min_advantage)"
)


FAILED = "replay/failed/"
"""What the metrics of failed queries begin with, before their kind."""


class Outlook:
    """Follows one start of a run, step by step."""

    def __init__(self, config: Config) -> None:
        self._steps, self._every = config.run.steps, config.eval.every
        self._has_rewards = config.sft is None  # a supervised run has no groups
        self._evaluation_s: float | None = None
        self._known, self._flat, self._unanswered = False, 0, 0
        self._compared, self._better, self._next = 0, 0.0, COMPARED

    def evaluated(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self._evaluation_s = seconds

    def after(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the events after a step: kind and text."""
        step = int(metrics["step"])
        if not self._known and step < self._steps:
            yield "run_outlook", self._remaining(step, metrics["time/step_s"])
        self._known = True
        if not self._has_rewards:
            return
        yield from self._of_hints(metrics)
        yield from self._of_teachers(metrics)
        self._flat = 0 if has_policy_gradient(metrics) else self._flat + 1
        rounds, rest = divmod(self._flat, FLAT_STEPS)
        if self._flat and not rest and not rounds & (rounds - 1):  # 5, 10, 20, 40
            yield "nothing_learned", self._warning(metrics)

    def _of_teachers(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Warn after 1, 2, 4, 8 ... steps in which queries to teachers failed and none answered."""
        if metrics.get("replay/answers"):
            self._unanswered = 0
        if metrics.get("replay/answers") or not metrics.get("replay/failures"):
            return
        self._unanswered += 1
        if not self._unanswered & (self._unanswered - 1):
            kinds = [one.removeprefix(FAILED) for one in metrics if one.startswith(FAILED)]
            yield (
                "teachers_do_not_answer",
                f"no teacher has answered in {self._unanswered} steps ({', '.join(sorted(kinds))} "
                f"in step {metrics['step']}), so there are no pairs: serve them at the base_url "
                "of [[replay.teachers]], or set replay.beta to 0",
            )

    def _of_hints(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Warn after 16, 32, 64 ... compared actions of a teacher that is not ahead at most."""
        compared = metrics.get("sdpo/advantage_sites") or 0
        self._compared += compared
        self._better += compared * (metrics.get("sdpo/advantage_wins") or 0.0)
        if self._compared < self._next:
            return
        while self._next <= self._compared:
            self._next *= 2
        if 2 * self._better <= self._compared:
            yield (
                "hints_do_not_help",
                f"the hinted teacher is no better than the student: a right action was likelier "
                f"with the hint at {round(self._better)} of {self._compared} sites: {REPAIR_HINTS}",
            )

    def _remaining(self, step: int, seconds: float) -> str:
        left = self._steps - step
        text = f"step {step} took {duration(seconds)}; {left} more will take about "
        text += duration(left * seconds)
        if self._evaluation_s is None:
            return f"{text}, and evaluations, of which none has been measured"
        count = 1 + sum(
            bool(self._every) and one % self._every == 0 for one in range(step, self._steps)
        )
        return f"{text}, and {count} evaluations {duration(count * self._evaluation_s)}"

    def _warning(self, metrics: Mapping[str, Any]) -> str:
        found = "no rollout earned a reward" if not metrics["reward/mean"] else "rewards are equal"
        return (
            f"in the last {self._flat} steps no group had different rewards, so the policy channel "
            f"had no gradient ({found} in step {metrics['step']}): {REPAIR}"
        )
