"""In how many steps each channel of a run had a gradient, and why it had none in the others.

    replay: configured, active in 0 of 6 steps: 24 x 401 from careful

Pure functions of the metrics of steps. The warnings of a run and its summary use the same text.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

Steps = Sequence[Mapping[str, Any]]
"""Metrics of some steps."""

CHANNELS = ("policy", "sdpo", "replay")
WEIGHTS = {"sdpo": "sdpo/alpha", "replay": "replay/beta"}
FAILED_BY, ANSWERED_BY = "replay/failed_by/", "replay/answered_by/"
BUDGET, SUSPENDED = "budget", "suspended"
"""Causes of queries that were not sent."""

WARNINGS = frozenset(
    (
        *("teacher_failing", "teacher_suspended", "budget_reached"),
        *("groups_flat", "hints_missing", "hints_do_not_help", "channel_inactive"),
        "flagged_onset",
    )
)
"""Kinds of the events that report a configured part of a run which has no effect, or rollouts that
earn their reward by other means."""


def channels_of(metrics: Steps) -> tuple[str, ...]:
    """Return the names of the run's channels: ours, then those that only its metrics have."""
    losses = (key for step in metrics for key in step if key.startswith("loss/"))
    found = dict.fromkeys([*CHANNELS, *(key.removeprefix("loss/") for key in losses)])
    return tuple(name for name in found if name != "total")


def activity_of(
    metrics: Steps, configured: Collection[str], rest: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the part `channels` of `summary.json`; `rest` has the figures after the last step.

    `inactive_because` states why a configured channel was not active in some of the steps.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((*channels_of(metrics), *configured)):
        idle = [step for step in metrics if not is_active(step, name)]
        found[name] = {"configured": name in configured, "active_steps": len(metrics) - len(idle)}
        if idle and name in configured:
            late = [rest] if name == "replay" else []
            found[name]["inactive_because"] = why_inactive(name, idle, late)
    return found


def activity_text(channel: Mapping[str, Any], steps: int) -> str:
    """Return the words of one channel's part of `summary.json`."""
    active, why = channel["active_steps"], "; ".join(channel.get("inactive_because", ()))
    if not channel["configured"] or not steps:
        return "configured" if channel["configured"] else "off"
    text = f"active in {active:,} of {steps:,} steps"
    if not active:
        return f"configured, {text}: {why}" if why else f"configured, {text}"
    return f"{text}; in the other {steps - active:,}: {why}" if why else text


def is_active(step: Mapping[str, Any], channel: str) -> bool:
    """Whether a channel added a gradient to a step."""
    on = step.get(f"loss/{channel}") is not None
    return on and (channel != "policy" or has_policy_gradient(step))


def has_policy_gradient(step: Mapping[str, Any]) -> bool:
    """Whether the rewards of any group of a step differ, by its metrics.

    Steps of earlier versions have no count of their groups: it is taken to be so.
    """
    groups = step.get("rollouts/groups")
    return groups is None or step["rollouts/flat_groups"] < groups


def is_switched_off(step: Mapping[str, Any], channel: str) -> bool:
    """Whether the schedule or the gate of a channel gave it the weight 0 in a step."""
    return step.get(WEIGHTS.get(channel, f"{channel}/weight")) == 0


def why_inactive(channel: str, idle: Steps, rest: Steps = ()) -> list[str]:
    """Return why a configured channel was not active in some steps, most important first.

    `rest` are figures of no step.
    """
    on = [step for step in idle if not is_switched_off(step, channel)]
    off = len(idle) - len(on)
    found = _REASONS.get(channel, _no_samples)([*on, *rest]) if on else []
    return [*found, *([f"weight 0 in {off:,} steps"] if off else [])]


def failed_queries(failed_by: Mapping[str, int], answers: int) -> list[str]:
    """Return what became of failed teacher queries: `39 of 48 queries refused by budget`.

    `failed_by` counts them by cause and teacher ("401/NAME").
    """
    causes = by_teacher(failed_by)
    total = answers + sum(failed_by.values())
    refused = sum(one.pop(BUDGET, 0) for one in causes.values())
    found = [f"{refused:,} of {total:,} queries refused by budget"] if refused else []
    return [*found, *(f"{counted(one)} from {listed(names)}" for names, one in alike(causes))]


def mostly_failed(metrics: Steps) -> bool:
    """Whether more queries failed than were answered, so that teachers can hardly agree."""
    return _total(metrics, "replay/failures") > _total(metrics, "replay/answers")


def by_teacher(failed_by: Mapping[str, int]) -> dict[str, Counter[str]]:
    """Return the failed queries of each teacher by cause."""
    causes: dict[str, Counter[str]] = {}
    for place, count in failed_by.items():
        cause, _, teacher = place.partition("/")
        if count:
            causes.setdefault(teacher, Counter())[cause] += count
    return causes


def alike(causes: Mapping[str, Counter[str]]) -> Iterator[tuple[list[str], Counter[str]]]:
    """Yield the names of teachers that failed for the same causes, and their queries by cause."""
    groups: dict[frozenset[str], list[str]] = {}
    for teacher, counts in causes.items():
        if counts:
            groups.setdefault(frozenset(counts), []).append(teacher)
    for names in groups.values():
        total = Counter[str]()
        for name in names:
            total.update(causes[name])
        yield names, total


def counted(causes: Counter[str]) -> str:
    """Return `24 x 401, 3 x timeout`; queries that were not sent come last."""
    ordered = sorted(causes.most_common(), key=lambda one: one[0] == SUSPENDED)
    return ", ".join(f"{count:,} x {cause}" for cause, count in ordered)


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(one for one in (", ".join(names[:-1]), *names[-1:]) if one)


def _flat_groups(idle: Steps) -> list[str]:
    dropped = _total(idle, "rollouts/dropped_groups")
    groups = _total(idle, "rollouts/groups") + dropped
    if not groups:
        return ["no group was rolled out"]
    flat = _total(idle, "rollouts/flat_groups") + dropped
    found = [f"{flat:,} of {groups:,} groups had equal rewards"]
    return found if _total(idle, "reward/mean") else [*found, "no rollout earned a reward"]


def _no_hints(idle: Steps) -> list[str]:
    rollouts = _total(idle, "rollouts/count")
    if views := _total(idle, "sdpo/views"):
        return [f"{views:,} hinted turns had no answer of an SDPO teacher"]
    counts = (
        ("could not be written", _total(idle, "hints/unwritten")),
        ("contained the answer", _total(idle, "hints/refused")),
        ("did not fit into policy.max_context", _total(idle, "hints/too_long")),
    )
    if found := [f"{count:,} hints {what}" for what, count in counts if count]:
        return found
    if sites := _total(idle, "rollouts/error_sites"):
        return [f"no hint source had a hint for {sites:,} error sites"]
    return [f"no error sites in {rollouts:,} rollouts"]


def _no_pairs(idle: Steps) -> list[str]:
    failed_by, answers = named_totals(idle, FAILED_BY), _total(idle, "replay/answers")
    found = failed_queries(failed_by, answers)
    outcomes = named_totals(idle, "replay/outcome/")
    dropped = named_totals(idle, "replay/dropped/")
    if not mostly_failed(idle):
        found += [
            f"{count:,} x {name.replace('_', ' ')}"
            for name, count in outcomes.items()
            if name != "pair"
        ]
    found += [f"{count:,} pairs dropped by {name}" for name, count in dropped.items()]
    if late := _total(idle, "replay/expired") + _total(idle[-1:], "replay/waiting"):
        found.append(f"{late:,} pairs came too late")
    if not found and (skipped := _total(idle, "replay/skipped")):
        found.append(f"the gate skipped {skipped:,} states")
    return found or ["no state was queried"]


def _no_samples(idle: Steps) -> list[str]:
    return [f"no samples of {_total(idle, 'rollouts/count'):,} rollouts"]


_REASONS: dict[str, Callable[[Steps], list[str]]] = {
    "policy": _flat_groups,
    "sdpo": _no_hints,
    "replay": _no_pairs,
}


def named_totals(metrics: Iterable[Mapping[str, Any]], prefix: str) -> dict[str, int]:
    """Return the sums of the metrics whose keys begin with `prefix`, by the rest of the key."""
    totals = Counter[str]()
    for step in metrics:
        for key, count in step.items():
            if key.startswith(prefix):
                totals[key.removeprefix(prefix)] += count or 0
    return dict(sorted(totals.items()))


def _total(metrics: Steps, key: str) -> Any:
    return sum(step.get(key) or 0 for step in metrics)
