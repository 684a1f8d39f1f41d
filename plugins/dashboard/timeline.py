"""The timeline of a run, as the page shows it: a lane for each actor.

A lane has what the actor did in the last steps, for the controller or for other actors, and is
blank where it was idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.services.inspection.census import parse_name

TIMELINE_STEPS = (1, 3, 6, 12)
KINDS = {
    "play": "rollout",
    "score_group": "rollout",
    "generate": "decode",
    "generate_many": "decode",
    "generate_round": "decode",
    "train": "train",
    "publish": "sync",
    "pull": "sync",
    "adopt": "sync",
    "query": "ask",
    "ask": "ask",
    "score": "score",
    "write": "hint",
    "teacher_output": "teach",
    "take_teacher_output": "teach",
    "save": "checkpoint",
    "saved": "checkpoint",
    "keep": "checkpoint",
}
"""What is drawn for an endpoint; others are `other`, and those of environments `task`."""
LEGEND = {
    "rollout": "plays rollouts",
    "decode": "samples tokens",
    "task": "runs the task",
    "train": "trains",
    "teach": "SDPO teacher's output",
    "ask": "queries teachers",
    "score": "reference log-probs",
    "hint": "writes hints",
    "sync": "weight sync",
    "checkpoint": "checkpoint",
    "other": "other calls",
}
ENVIRONMENT = "environment"
HEIGHT = 18
MOST_LANES = 64


@dataclass(frozen=True)
class Lane:
    """One actor: its bars, and the share of the time in which it worked."""

    actor: str
    busy: float
    bars: Sequence[tuple[str, float, float, str]]
    """Kind, begin and length as shares of the whole, and what a pointer shows."""
    edges: Sequence[float]

    def svg(self) -> Markup:
        """Draw the lane over the width of the page."""
        parts = [
            f'<rect class="bar {kind}" x="{begin:.3%}" width="{max(length, 0.001):.3%}" '
            f'height="{HEIGHT}"><title>{escape(label)}</title></rect>'
            for kind, begin, length, label in self.bars
        ]
        parts += [
            f'<line class="edge" x1="{edge:.3%}" x2="{edge:.3%}" y2="{HEIGHT}"/>'
            for edge in self.edges
        ]
        label = f"{escape(self.actor)} worked {self.busy:.0%} of the time"
        return Markup(
            f'<svg class="lane" width="100%" height="{HEIGHT}" role="img" aria-label="{label}">'
            f"{''.join(parts)}</svg>"
        )


@dataclass(frozen=True)
class Timeline:
    """Lanes over some steps, `seconds` long."""

    lanes: Sequence[Lane]
    first: int
    last: int
    seconds: float

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds that are drawn, with what they mean."""
        drawn = {kind for lane in self.lanes for kind, *_ in lane.bars}
        return {kind: meaning for kind, meaning in LEGEND.items() if kind in drawn}


def last_steps(run: OpenRun, wanted: str | None) -> dict[str, Any]:
    """Return the lanes of the last steps, as many as are wanted if that is one of the choices."""
    steps = next((one for one in TIMELINE_STEPS if str(one) == wanted), TIMELINE_STEPS[1])
    found = timeline_of(run.timeline(steps))
    return {"timeline": found, "timeline_steps": steps, "choices": TIMELINE_STEPS}


def timeline_of(lines: Sequence[Mapping[str, Any]]) -> Timeline | None:
    """Return the lanes of consecutive steps, as `timeline.jsonl` has them; None without any."""
    steps = [line for line in lines if _is_line(line)]
    if not steps:
        return None
    began = min(float(line["began"]) for line in steps)
    ended = max(float(line["ended"]) for line in steps)
    length = max(ended - began, 1e-9)
    edges = [(float(line["began"]) - began) / length for line in steps[1:]]
    spans: dict[str, list[tuple[str, float, float]]] = {}
    worked: dict[str, float] = {}
    for line in steps:
        for actor, seconds in filter(_is_worked, line["worked"].items()):
            if actor in worked or len(worked) < MOST_LANES:
                worked[actor] = worked.get(actor, 0.0) + seconds
        for actor, endpoint, begin, end in filter(_is_span, line["busy"]):
            begin, end = max(begin, began), min(end, ended)
            if end > begin and actor in worked:
                spans.setdefault(actor, []).append((endpoint, begin, end))
    lanes = [
        Lane(
            actor, worked[actor] / length, _bars(actor, spans.get(actor, ()), began, length), edges
        )
        for actor in sorted(worked)
    ]
    return Timeline(lanes, int(steps[0]["step"]), int(steps[-1]["step"]), length)


def _bars(
    actor: str, spans: Sequence[tuple[str, float, float]], began: float, length: float
) -> list[tuple[str, float, float, str]]:
    return [
        (
            _kind(actor, endpoint),
            (begin - began) / length,
            (end - begin) / length,
            f"{endpoint}, {end - begin:.3f} s",
        )
        for endpoint, begin, end in spans
    ]


def _kind(actor: str, endpoint: str) -> str:
    return "task" if parse_name(actor).mesh == ENVIRONMENT else KINDS.get(endpoint, "other")


def _is_line(line: Mapping[str, Any]) -> bool:
    numbers = all(_is_time(line.get(key)) for key in ("step", "began", "ended"))
    return numbers and isinstance(line.get("busy"), list) and isinstance(line.get("worked"), dict)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_worked(one: tuple[str, Any]) -> bool:
    return _is_time(one[1]) and one[1] >= 0


def _is_span(span: Any) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 4
        and all(isinstance(one, str) for one in span[:2])
        and all(map(_is_time, span[2:]))
    )
