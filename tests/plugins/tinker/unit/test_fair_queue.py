"""The order of operations: by number for a model, by what they were served for clients."""

import random
from collections import Counter

import pytest

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server.fair_queue import OpenCounts, SampleQueue, TrainingQueue
from composer_mesh.plugins.tinker.server.records import Operation, OperationRequest
from composer_mesh.services.web.errors import RequestRefused


class Made:
    """Makes operations with numbers in order."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(
        self, client: str, model: str = "", seq: int | None = None, cost: int = 1
    ) -> Operation:
        self.number += 1
        kind = "forward" if model else "sample"
        request = OperationRequest(client, kind, model, seq, b"", model, cost)
        return Operation(self.number, f"r{self.number}", request, 0)


def test_each_model_is_served_in_order_whatever_the_order_of_arrival() -> None:
    rng, make, queue = random.Random(1), Made(), TrainingQueue()
    for model in "abc":
        queue.begin(model, f"client-{model}", 1)
    asked = [(model, seq) for model in "abc" for seq in range(1, 21)]
    rng.shuffle(asked)
    served: dict[str, list[int | None]] = {model: [] for model in "abc"}
    for model, seq in asked:
        queue.put(make(f"client-{model}", model, seq))
        if rng.random() < 0.3:
            for one in queue.take(2, 3, 100):
                served[one.model].append(one.request.seq)
    while taken := queue.take(2, 3, 100):
        for one in taken:
            served[one.model].append(one.request.seq)
    assert served == {model: [*range(1, 21)] for model in "abc"}
    assert len(queue) == 0


def test_a_client_with_many_models_gets_no_more_than_one_with_one() -> None:
    make, queue = Made(), TrainingQueue()
    for number in range(8):
        queue.begin(f"g{number}", "greedy", 1)
    queue.begin("m", "modest", 1)
    for seq in range(1, 101):
        for number in range(8):
            queue.put(make("greedy", f"g{number}", seq, cost=10))
        queue.put(make("modest", "m", seq, cost=10))
    counts = Counter(one.request.client for _ in range(40) for one in queue.take(1, 1, 1000))
    assert abs(counts["greedy"] - counts["modest"]) <= 1


def test_a_client_that_was_away_saves_nothing_up() -> None:
    make, queue = Made(), SampleQueue()
    for _ in range(100):
        queue.put(make("busy", cost=10))
    for _ in range(50):
        queue.take()
    for _ in range(50):
        queue.put(make("late", cost=10))
    served = [one.request.client for _ in range(40) if (one := queue.take()) is not None]
    assert 18 <= served.count("late") <= 22


def test_cost_counts_and_not_the_number_of_operations() -> None:
    make, queue = Made(), SampleQueue()
    for _ in range(200):
        queue.put(make("small", cost=1))
        queue.put(make("large", cost=9))
    served = Counter(one.request.client for _ in range(100) if (one := queue.take()) is not None)
    assert served["small"] > 6 * served["large"]


def test_operations_without_a_number_keep_their_order() -> None:
    make, queue = Made(), TrainingQueue()
    queue.begin("a", "one", 1)
    asked = [make("one", "a", seq) for seq in (1, None, 2, None)]
    for one in asked:
        queue.put(one)
    assert [one.number for one in queue.take(1, 10, 10)] == [1, 2, 3, 4]


def test_a_number_that_was_passed_is_refused() -> None:
    make, queue = Made(), TrainingQueue()
    queue.begin("a", "one", 1)
    queue.put(make("one", "a", 1))
    queue.take(1, 1, 1)
    with pytest.raises(RequestRefused, match="up to 1 of this model were executed"):
        queue.check_seq("a", 1)
    queue.check_seq("a", 2)


def test_open_operations_and_their_bytes_are_counted_for_each_client_and_for_all() -> None:
    limits = ServeConfig(
        max_open_operations=3, max_open_per_client=2, max_open_mb=1e-4, max_open_mb_per_client=6e-5
    )
    counts = OpenCounts(limits)
    counts.add("a", 10)
    counts.add("a", 50)
    with pytest.raises(
        RequestRefused, match="2 operations of yours are open, of at most 2"
    ) as refused:
        counts.add("a", 0)
    assert refused.value.status == 429
    counts.remove("a", 10)
    with pytest.raises(
        RequestRefused, match="have 50 bytes and this one 11, of at most 60"
    ) as refused:
        counts.add("a", 11)
    assert refused.value.status == 429
    with pytest.raises(RequestRefused, match="all open operations have 50 bytes and this one 51"):
        counts.add("b", 51)
    with pytest.raises(
        RequestRefused, match="has 61 bytes, and those that wait at most 60"
    ) as refused:
        counts.add("b", 61)
    assert refused.value.status == 413
    counts.add("b", 50)
    counts.add("b", 0)
    with pytest.raises(RequestRefused, match="3 operations are open, of at most 3"):
        counts.add("c", 0)
    counts.add("c", 70, checked=False)
    for client, size in (("a", 50), ("b", 50), ("b", 0), ("c", 70)):
        counts.remove(client, size)
    assert (counts.total, counts.bytes) == (0, 0)


def test_operations_that_are_taken_together_have_bounded_bytes() -> None:
    queue = TrainingQueue()
    for model in "ab":
        queue.begin(model, model, 1)
        for seq in (1, 2, 3):
            request = OperationRequest(model, "forward", model, seq, b"", model)
            queue.put(Operation(ord(model) * seq, "", request, 40 * 2**20))
    taken = []
    while group := queue.take(8, 4, 10**9):
        taken.append([(one.model, one.request.seq) for one in group])
    assert taken == [[("a", 1), ("a", 2)], [("b", 1), ("b", 2)], [("a", 3), ("b", 3)]]
