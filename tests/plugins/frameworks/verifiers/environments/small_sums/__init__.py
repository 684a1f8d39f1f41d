"""A taskset of the tests: sums, answered with or without a tool; some tasks fail on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["SmallSums"]


class SumData(vf.TaskData):
    """A sum, and what goes wrong with it."""

    answer: str
    fault: str = ""


class SumTask(vf.Task[SumData]):
    """Right if the last word is the answer."""

    async def setup(self, trace: Any) -> None:
        if self.data.fault == "sandbox":
            raise vf.SandboxError("the box is gone")
        if self.data.fault == "code":
            raise KeyError("no such row")

    @vf.reward(weight=2.0)
    async def right(self, trace: Any) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.reward(weight=0.5)
    async def spoke(self, trace: Any) -> float:
        return float(bool(trace.last_reply))

    @vf.metric
    async def letters(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class SmallSumsConfig(vf.TasksetConfig):
    """How many sums, and which fault one of them has."""

    sums: int = 24
    fault: str = ""
    fault_at: int = 2


class SmallSums(vf.Taskset[SumTask, SmallSumsConfig]):
    """Sums of two digits."""

    def load(self) -> Iterable[SumTask]:
        for index in range(self.config.sums):
            a, b = index % 5 + 1, index % 4 + 1
            data = SumData(
                prompt=f"{a} plus {b}?",
                answer=str(a + b),
                fault=self.config.fault if index == self.config.fault_at else "",
            )
            yield SumTask(data, self.config.task)
