"""What a run will take, and which configured parts have no effect: read off its steps' metrics.

    event              when
    run_outlook        after the first step of a start
    teacher_failing    a step in which a teacher's queries were refused, and none was answered
    teacher_suspended  a step in which queries were not sent, since the teacher's breaker is open
    budget_reached     a step in which queries were not sent, since they might exceed a budget
    groups_flat        the policy channel had no gradient in some steps in a row
    hints_missing      the SDPO channel had no hinted turn in some steps in a row
    channel_inactive   another configured channel had no gradient in some steps in a row
    hints_do_not_help  the hinted teacher is no better than the student
    flagged_onset      the share of rollouts that the task's monitor flags has risen

Each but the last is repeated at doubling distances. Knows neither actors nor clocks.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.channel_activity import (
    ANSWERED_BY,
    BUDGET,
    FAILED_BY,
    SUSPENDED,
    alike,
    by_teacher,
    counted,
    is_active,
    is_switched_off,
    listed,
    mostly_failed,
    named_totals,
    why_inactive,
)
from composer_mesh.services.directory.report import duration

Event = tuple[str, str]
"""Kind and text."""

IDLE_STEPS = 5
"""Steps in a row without a gradient of a channel after which a run is warned.

With 8 groups a step of which one in ten has mixed rewards, five flat steps by chance alone are one
case in seventy.
"""
IDLE_EVENTS = {"policy": "groups_flat", "sdpo": "hints_missing"}
REPAIRS = {
    "policy": "raise schedule.group_size or generator.temperature, train on easier episodes "
    "([data.curriculum]), or fine-tune first: composer-mesh sft",
    "sdpo": "let the task's errors name a hint template, add sources (sdpo.hints.sources), or set "
    "sdpo.alpha to 0",
    "replay": "lower replay.gate.min_value or replay.agreement_threshold, add teachers that differ "
    "from the policy, or set replay.beta to 0",
}
REPAIR_TEACHERS = "serve them at the base_url of [[replay.teachers]], or set replay.beta to 0"


COMPARED = 16
"""Compared actions after which a run is warned of a hinted teacher that is no better.

Where it is as good as the student, it is behind at half of them or more.
"""
REPAIR_HINTS = (
    "teach the policy to read hints ([sft] hinted_share), take hints from elsewhere "
    "(sdpo.hints.sources), or pause the channel while it does not help (sdpo.min_advantage)"
)


class Outlook:
    """Follows one start of a run, step by step; `channels` are those that it trains."""

    def __init__(self, config: Config, channels: Sequence[str]) -> None:
        self._steps, self._every = config.run.steps, config.eval.every
        self._evaluation_s: float | None = None
        self._known = False
        self._channels = IdleChannels(channels)
        self._teachers = TeacherWarnings()
        self._flagged = FlaggedOnset()
        self._compared, self._better, self._next = 0, 0.0, COMPARED

    def evaluated(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self._evaluation_s = seconds

    def after(self, metrics: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[Event]:
        """Yield the events after a step.

        `reasons` are messages of failed queries by cause and teacher ("401/NAME").
        """
        step = int(metrics["step"])
        if not self._known and step < self._steps:
            yield "run_outlook", self._remaining(step, metrics["time/step_s"])
        self._known = True
        yield from self._of_hints(metrics)
        yield from self._teachers.after(f"in step {step}", metrics, reasons)
        yield from self._channels.after(metrics)
        yield from self._flagged.after(metrics)

    def at_end(self, rest: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[Event]:
        """Yield the events after the last step; `rest` are the teachers' figures since then."""
        yield from self._teachers.after("after the last step", rest, reasons)
        yield from self._channels.at_end(rest)

    def _of_hints(self, metrics: Mapping[str, Any]) -> Iterator[Event]:
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


class IdleChannels:
    """Warns of configured channels that had no gradient in 5, 10, 20, 40 ... steps in a row.

    Steps of weight 0 do not count. Where most queries to teachers failed, `TeacherWarnings` reports
    that.
    """

    def __init__(self, channels: Sequence[str]) -> None:
        self._idle = dict.fromkeys(channels, 0)
        self._last = {name: deque[Mapping[str, Any]](maxlen=IDLE_STEPS) for name in channels}
        self._worked: set[str] = set()

    def after(self, metrics: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events after a step."""
        for name in self._idle:
            if is_active(metrics, name):
                self._idle[name] = 0
                self._last[name].clear()
                self._worked.add(name)
            elif not is_switched_off(metrics, name):
                self._idle[name] += 1
                self._last[name].append(metrics)
                rounds, rest = divmod(self._idle[name], IDLE_STEPS)
                if not rest and not rounds & (rounds - 1):
                    yield from self._events(name)

    def at_end(self, rest: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of channels that never worked, in too few steps to be warned of."""
        for name, idle in self._idle.items():
            if 0 < idle < IDLE_STEPS and name not in self._worked:
                yield from self._events(name, rest)

    def _events(self, name: str, *rest: Mapping[str, Any]) -> Iterator[Event]:
        last = self._last[name]
        if name == "replay" and mostly_failed([*last, *rest]):
            return
        why = "; ".join(why_inactive(name, last))
        if self._idle[name] > len(last):
            why = f"in the last {len(last)}: {why}"
        repair = REPAIRS.get(
            name, f"look at what its samples() returns, or set channels.{name}.weight to 0"
        )
        text = f"{name}: configured, active in 0 of the last {self._idle[name]} steps: {why}"
        yield IDLE_EVENTS.get(name, "channel_inactive"), f"{text}: {repair}"


FLAGGED = "reward/of/flagged"
ONSET_STEPS = 5
"""Steps whose mean share of flagged rollouts is compared with that of all steps before them."""
ONSET_SHARE, ONSET_RATIO = 0.1, 2.0
"""Share from which on a rise is reported, and how many times the earlier one it has to be."""


class FlaggedOnset:
    """Reports when the share of flagged rollouts rises, and again after it has fallen below half.

    Tasks with a monitor state the share as their reward function `flagged`.
    """

    def __init__(self) -> None:
        self._last = deque[float](maxlen=ONSET_STEPS)
        self._earlier, self._steps, self._risen = 0.0, 0, False

    def after(self, metrics: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the event of a step, if there is one."""
        share = metrics.get(FLAGGED)
        if share is None:
            return
        if len(self._last) == ONSET_STEPS:
            self._earlier += self._last[0]
            self._steps += 1
        self._last.append(share)
        recent = sum(self._last) / ONSET_STEPS
        earlier = self._earlier / self._steps if self._steps else 0.0
        if self._risen:
            self._risen = recent >= ONSET_SHARE / 2
        elif recent >= max(ONSET_SHARE, ONSET_RATIO * earlier):
            self._risen = True
            yield (
                "flagged_onset",
                f"{recent:.0%} of the rollouts of the last {ONSET_STEPS} steps are flagged, "
                f"after {earlier:.0%} before: read some (composer-mesh traces RUN), and keep them "
                'from training by data.options.monitor = "screen"',
            )


class TeacherWarnings:
    """Warns of teachers after 1, 2, 4, 8 ... steps in which none of their queries was answered.

    Refusals by budget and suspended teachers are counted in the same way, whoever else answers.
    """

    def __init__(self) -> None:
        self._steps = Counter[tuple[str, str]]()

    def after(
        self, when: str, metrics: Mapping[str, Any], reasons: Mapping[str, str]
    ) -> Iterator[Event]:
        """Yield the events of some figures, those of a step or after the last one."""
        causes = by_teacher(named_totals([metrics], FAILED_BY))
        answered_by = named_totals([metrics], ANSWERED_BY)
        total = sum(answered_by.values()) + sum(one.total() for one in causes.values())
        for kind, (cause, fate) in UNSENT.items():
            unsent = {name: one.pop(cause) for name, one in causes.items() if cause in one}
            due = self._due(kind, {name: Counter({cause: n}) for name, n in unsent.items()})
            for names, counts in alike(due):
                queries = f"{counts.total():,} of {total:,} queries to {listed(names)} {fate}"
                yield kind, f"{queries} {when}: {_reason(reasons, names, counts)}"
        for name in answered_by:
            del self._steps[FAILING, name]
        failing = {name: one for name, one in causes.items() if one and name not in answered_by}
        for names, counts in alike(self._due(FAILING, failing)):
            failed = f"{listed(names)} answered none of {counts.total():,} queries {when}"
            yield FAILING, f"{failed} ({counted(counts)}): {_reason(reasons, names, counts)}"

    def _due(self, kind: str, causes: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
        """Count a step of these teachers; return those that are to be warned of."""
        for teacher in causes:
            self._steps[kind, teacher] += 1
        steps = {teacher: self._steps[kind, teacher] for teacher in causes}
        return {one: causes[one] for one, n in steps.items() if not n & (n - 1)}


FAILING = "teacher_failing"
UNSENT = {
    "budget_reached": (BUDGET, "refused by budget"),
    "teacher_suspended": (SUSPENDED, "not sent"),
}
"""Events of queries that were not sent: their cause, and what became of them."""


def _reason(reasons: Mapping[str, str], teachers: Sequence[str], causes: Iterable[str]) -> str:
    """Return the first message of some failures of some teachers, else what helps in general."""
    places = [f"{cause}/{teacher}" for cause in causes for teacher in teachers]
    return next((reasons[place] for place in places if place in reasons), REPAIR_TEACHERS)
