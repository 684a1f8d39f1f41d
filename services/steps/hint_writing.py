"""Requests hint texts from the hint writer for the error sites of finished groups.

Sites are selected by the same rules that the batch uses, so no text is requested where a better
hint source would be used. The writer actor sends the requests; the batcher builds token ids.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Literal

from composer_mesh.channels.sdpo import hint_sources
from composer_mesh.configs.schema import Config
from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_sources import HintCounts, Place, WrittenHint, ordered_sites
from composer_mesh.rollouts.hints import HintReply, HintRequest, hint_request, one_line_hint
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.steps.ports import HintWriter
from composer_mesh.tasks.task import Task

MOST_REASONS = 8


@dataclass
class WrittenHints:
    """Texts of the hint writer for some groups, with the requests sent and their cost."""

    written: dict[Place, WrittenHint] = field(default_factory=dict)
    requests: int = 0
    usd: float = 0.0

    def __iadd__(self, other: "WrittenHints") -> "WrittenHints":
        self.written |= other.written
        self.requests += other.requests
        self.usd += other.usd
        return self


def worded_to_json(worded: WrittenHints) -> bytes:
    """Serialize a group's hint texts as JSON; numbers round-trip bit for bit."""
    written = [[*place, words.text, words.wording] for place, words in worded.written.items()]
    body = {"written": written, "requests": worded.requests, "usd": worded.usd}
    return json.dumps(body, allow_nan=False).encode()


def worded_from_json(body: bytes) -> WrittenHints:
    """Read what `worded_to_json` wrote; raise ValueError for anything else."""
    found = _STORED.validate_json(body)
    written = {(trace, turn): WrittenHint(text, how) for trace, turn, text, how in found.written}
    return WrittenHints(written, found.requests, found.usd)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The JSON of a group's hint texts."""

    written: list[tuple[str, int, str, Literal["llm", "cached"]]]
    requests: int
    usd: float


_STORED = fail_fast(_Stored)


class FirstReasons:
    """Reports why hints are missing: each reason once, at most `MOST_REASONS` in all."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._reported: set[str] = set()

    def __call__(self, reason: str) -> None:
        if reason not in self._reported and len(self._reported) < MOST_REASONS:
            self._reported.add(reason)
            self._report(reason)


class HintWriting:
    """Requests hint texts for each group's share of `max_sites_per_step`.

    `report` is called with the reason where the template was used in place of the writer.
    """

    def __init__(
        self,
        writer: HintWriter,
        config: Config,
        task: Task,
        chat: ChatFormat,
        report: Callable[[str], None],
    ) -> None:
        self._writer, self._report = writer, FirstReasons(report)
        self._sites = config.sdpo.sites
        self._limit = config.sdpo.max_sites_per_step
        self._prompts = config.schedule.prompts_per_step
        hints, templates = config.sdpo.hints, task.hint_templates
        self._sources = hint_sources(chat, attrgetter("answer"), hints, {}, templates)

    async def ask(self, group: Sequence[Trace]) -> WrittenHints:
        """Return the hint texts of one group. Waits for the writer, at most its timeout."""
        requests = self._requests([one for trace in group for one in trace.trajectories()])
        replies = await self._writer.write(list(requests.values())) if requests else []
        found = WrittenHints()
        for place, reply in zip(requests, replies, strict=True):
            found += _worded(place, reply)
            if reply.reason:
                self._report(reply.reason)
        return found

    def _requests(self, group: Sequence[Trace]) -> Mapping[Place, HintRequest]:
        """Return the requests for the turns whose best hint comes from the error source."""
        places = ordered_sites(group, lambda trace: self._sources.turns(trace, group), self._sites)
        requests: dict[Place, HintRequest] = {}
        for trace, turn in islice(places, self._share(group[0].group_id)):
            hint = next(self._sources.hints(trace, turn, group, HintCounts()), None)
            if hint is not None and hint.site is not None:
                request = hint_request(trace, hint.site, hint.text, trace.answer)
                if request is not None:
                    requests[trace.trace_id, turn] = request
        return requests

    def _share(self, group_id: int) -> int:
        """Return the group's share of `max_sites_per_step`; the shares of a step add up to it."""
        place = group_id % self._prompts
        parts = (self._limit * (place + 1) // self._prompts, self._limit * place // self._prompts)
        return parts[0] - parts[1]


def _worded(place: Place, reply: HintReply) -> WrittenHints:
    text = one_line_hint(reply.text)
    written = {place: WrittenHint(text, reply.origin)} if text and reply.origin != "none" else {}
    return WrittenHints(written, int(reply.sent), reply.usd)
