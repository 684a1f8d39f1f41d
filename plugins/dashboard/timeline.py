"""The timeline of a run as lanes: what each actor did in the last steps, and its idle time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

KINDS = {
    "play": "rollout",
    "score_group": "rollout",
    "train": "train",
    "publish": "sync",
    "pull": "sync",
    "adopt": "sync",
    "query": "ask",
    "score": "score",
    "write": "hint",
    "teacher_output": "teach",
    "take_teacher_output": "teach",
    "save": "checkpoint",
    "saved": "checkpoint",
    "keep": "checkpoint",
}
"""What is drawn for an endpoint; others are `other`."""
LEGEND = {
    "rollout": "plays rollouts",
    "train": "trains",
    "teach": "SDPO teacher's output",
    "ask": "asks teachers",
    "score": "reference log-probs",
    "hint": "writes hints",
    "sync": "weight sync",
    "checkpoint": "checkpoint",
    "other": "other calls",
}
HEIGHT = 18
MOST_LANES = 64


@dataclass(frozen=True)
class Lane:
    """One actor: its bars, and the share of the time in which it worked for the controller."""

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
    for line in steps:
        for actor, endpoint, begin, end in filter(_is_span, line["busy"]):
            begin, end = max(begin, began), min(end, ended)
            if end > begin and (actor in spans or len(spans) < MOST_LANES):
                spans.setdefault(actor, []).append((endpoint, begin, end))
    lanes = [_lane(actor, found, began, length, edges) for actor, found in sorted(spans.items())]
    return Timeline(lanes, int(steps[0]["step"]), int(steps[-1]["step"]), length)


def _lane(
    actor: str,
    spans: Sequence[tuple[str, float, float]],
    began: float,
    length: float,
    edges: Sequence[float],
) -> Lane:
    bars = [
        (
            KINDS.get(endpoint, "other"),
            (begin - began) / length,
            (end - begin) / length,
            f"{endpoint}, {end - begin:.3f} s",
        )
        for endpoint, begin, end in spans
    ]
    return Lane(actor, _covered([(a, b) for _, a, b in spans]) / length, bars, edges)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that intervals cover together."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _is_line(line: Mapping[str, Any]) -> bool:
    numbers = all(isinstance(line.get(key), int | float) for key in ("step", "began", "ended"))
    return numbers and isinstance(line.get("busy"), list)


def _is_span(span: Any) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 4
        and all(isinstance(one, str) for one in span[:2])
        and all(isinstance(one, int | float) for one in span[2:])
    )
