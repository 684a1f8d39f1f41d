"""Experts of the task that cost money, with a record of every answer that was paid for.

Served on 127.0.0.1 by `ExpertServer`, in threads of this process, so that it outlives the runs that
query it.
"""

import json
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from composer_mesh.actors.experts.http import Expert, ExpertPanel
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.toolbox import ToolboxTask

PROMPT_USD, COMPLETION_USD = 1e-6, 1e-5
"""Prices per token."""

ARRIVAL_S = 0.25
"""An answer is in flight until its client has had this long to read and store it."""
LATENCY_S = 0.1


@dataclass
class Payment:
    """One answer that was charged; `answered` is when it was sent, None before."""

    usd: float
    began: float
    answered: float | None = None


class PaidPanel(ExpertPanel):
    """Charges a question when it arrives, and answers it after a while."""

    def __init__(self, task: ToolboxTask, names: tuple[str, ...]) -> None:
        super().__init__(task, 0, [Expert(name, 0.02) for name in names])
        self._payments: defaultdict[str, list[Payment]] = defaultdict(list)
        self._lock = threading.Lock()

    def completion(self, name: str, messages: list[Message]) -> dict[str, Any]:
        reply = super().completion(name, messages)
        usage = reply["usage"]
        usd = usage["prompt_tokens"] * PROMPT_USD + usage["completion_tokens"] * COMPLETION_USD
        payment, usage["cost"] = Payment(usd, time.monotonic()), usd
        with self._lock:
            self._payments[json.dumps([name, messages], sort_keys=True)].append(payment)
        time.sleep(LATENCY_S)
        payment.answered = time.monotonic()
        return reply

    def charged(self) -> float:
        """Return all charges, in dollars."""
        return sum(one.usd for paid in self._payments.values() for one in paid)

    def twice(self, kills: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the dollars of answers to questions that were answered before: in all, and
        those of them whose former answer was in flight when the run was killed. A kill has a
        start and an end."""
        repeated = [pair for paid in self._payments.values() for pair in pairwise(paid)]
        lost = [
            again.usd
            for before, again in repeated
            if any(_on_its_way(before, *kill) for kill in kills)
        ]
        return sum(again.usd for _, again in repeated), sum(lost)


def _on_its_way(payment: Payment, kill_began: float, kill_ended: float) -> bool:
    arrived = kill_began if payment.answered is None else payment.answered + ARRIVAL_S
    return payment.began <= kill_ended and kill_began <= arrived
