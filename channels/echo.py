"""ECHO: the policy also predicts what its environment answers.

Cross-entropy of the ids of tool results that a rollout's later actions have read, in the forward
that the policy loss has anyway. As in prime-rl: contents alone, not what the chat template writes
around them, and nothing before the first action; divided by their number over the whole step.

Source: arXiv 2605.24517.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from composer_mesh.channels.port import Channel, ChannelRows
from composer_mesh.rollouts.batches import ChannelSample
from composer_mesh.rollouts.traces import Trace

ROLES = ("tool", "user", "system")


class Echo(Channel):
    """Trains messages of these `roles`; raises ValueError for one that is not an environment's."""

    def __init__(self, name: str, roles: Sequence[str] = ("tool",)) -> None:
        super().__init__(name)
        if not roles or not set(roles) <= set(ROLES):
            raise ValueError(f"roles is {list(roles)}: write some of {', '.join(ROLES)}")
        self._roles = frozenset(roles)

    def samples(self, traces: Sequence[Trace]) -> Iterable[ChannelSample]:
        for trace in traces:
            values = [0.0] * len(trace.token_ids())
            for place in self._observed(trace):
                values[place] = 1.0
            yield ChannelSample(trace.trace_id, values)

    def loss(self, rows: ChannelRows) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        nats = -(rows.values * rows.logprobs).sum()
        return nats, {"nats": nats.detach()}

    def _observed(self, trace: Trace) -> Iterator[int]:
        """Yield the places of the ids that are trained, among all of a trace."""
        if self.chat is None:
            raise ValueError("the chat format is not known: samples are made in a run")
        at, spoken = 0, trace.action_places()
        for number, turn in enumerate(trace.turns):
            if number:
                between = trace.messages[spoken[number - 1] + 1 : spoken[number]]
                before = trace.turns[number - 1].action_ids
                spans = self.chat.contents(between, before, turn.context_ids)
                for message, span in zip(between, spans, strict=True):
                    if message["role"] in self._roles:
                        yield from (at + place for place in span)
            at += len(turn.context_ids) + len(turn.action_ids)
