"""Traces of one TRL generation batch, with the hinted turns that SDPO trains.

Imports no TRL: rows, outputs and environments are those that its trainer holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.channels.sdpo.samples import HintedSites, hinted_sites
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.traces import Completion, trace_of_completion
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import HintTemplates
from composer_mesh.rollouts.traces import Trace

Rows = Sequence[Mapping[str, Any]]
Traces = list[Trace | None]


def batch_traces(
    rows: Rows,
    found: Mapping[str, Any],
    completions: Sequence[Any],
    environments: Sequence[Any] | None,
    tools: Sequence[str],
    name: str,
) -> Traces:
    """Return the trace of each row; None where TRL leaves a row out of its loss.

    `found` is what TRL made of the rows, `completions` what the model said, `tools` the names of
    the tools. `name` begins the ids of traces that are made here: `TaskRollouts` brings its own.
    """
    if all(isinstance(row.get("trace"), Trace) for row in rows):
        kept = found["completion_mask"].bool().any(-1).tolist()
        return [row["trace"] if one else None for row, one in zip(rows, kept, strict=True)]
    group, traces = 0, Traces()
    for place, row in enumerate(rows):
        group += place > 0 and row.get("prompt") != rows[place - 1].get("prompt")
        environment = environments[place] if environments else None
        one = _completion(place, row, found, completions[place], environment)
        trace_id, answer = f"{name}-{place:04d}", row.get("answer")
        traces.append(
            trace_of_completion(one, trace_id, group, place, tools, answer) if one.ids else None
        )
    return traces


def _completion(
    place: int, row: Mapping[str, Any], found: Mapping[str, Any], said: Any, environment: Any
) -> Completion:
    shown = found["completion_mask"][place].bool()
    sampled = found["tool_mask"][place][shown] if "tool_mask" in found else shown[shown]
    prompt = row.get("prompt")
    return Completion(
        found["prompt_ids"][place][found["prompt_mask"][place].bool()].tolist(),
        found["completion_ids"][place][shown].tolist(),
        sampled.bool().tolist(),
        prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}],
        said if isinstance(said, list) else [{"role": "assistant", "content": str(said)}],
        environment,
    )


def batch_sites(
    traces: Traces,
    sdpo: SdpoConfig,
    chat: ChatFormat,
    templates: HintTemplates,
    limit: int,
    longest: int,
) -> HintedSites:
    """Return at most `limit` hinted turns; a context with a hint has at most `longest` ids."""
    return hinted_sites(
        [one for one in traces if one is not None],
        chat,
        lambda trace: trace.answer,
        limit,
        longest,
        sdpo.hints,
        templates=templates,
    )


def views_by_row(traces: Traces, views: Sequence[HintedView]) -> list[list[HintedView]]:
    """Return the hinted turns of each row, in order."""
    by_trace: dict[str, list[HintedView]] = {}
    for view in views:
        by_trace.setdefault(view.trace_id, []).append(view)
    return [[] if trace is None else by_trace.get(trace.trace_id, []) for trace in traces]
