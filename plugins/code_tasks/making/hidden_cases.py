"""Hidden cases: recorded inputs and others made of them, and what the original functions return.

Inputs are called twice, in opposite orders, by the program that the judge uses. A function is left
out if its answers to any input do not agree by the judge's own comparison: it draws numbers, or
depends on what was called before.

Further inputs are made of recorded ones, so that no test shows what a hidden case calls. An
argument is exchanged for one that another call had in its place, or varied within what all calls
had there: the types, the bounds of numbers and the lengths of lists stay. So a right function may
be expected to take it; only the original says whether it does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, JudgedTask, without_tests
from composer_mesh.plugins.code_tasks.judge.tests_box import agrees, run_program
from composer_mesh.plugins.code_tasks.making.functions import Function
from composer_mesh.plugins.code_tasks.making.package import MakingLimits, Package
from composer_mesh.plugins.code_tasks.values import decode, encode
from composer_mesh.tasks.sandbox import FileTree, Sandbox

LONGEST_INPUT = 3000
TRIES = 10
"""Draws for each input that is wanted; most functions with few recorded calls allow fewer."""

Place = tuple[str, int | str]


def generated_calls(calls: Sequence[Call], most: int) -> list[Call]:
    """Return at most `most` new calls of each target, the same ones for the same recorded calls."""
    targets: dict[str, list[Call]] = {}
    for call in calls:
        targets.setdefault(call["target"], []).append(call)
    return [one for own in targets.values() for one in _of_target(own, most)]


def _of_target(own: Sequence[Call], most: int) -> Iterator[Call]:
    rng = random.Random(own[0]["target"])
    known = {_key(call) for call in own}
    found = 0
    for _ in range(TRIES * most):
        if found == most:
            return
        call = _varied_call(rng.choice(own), own, rng)
        key = _key(call)
        if key not in known and len(key) <= LONGEST_INPUT:
            known.add(key)
            found += 1
            yield call


def _varied_call(base: Call, own: Sequence[Call], rng: random.Random) -> Call:
    """Return a call with one or two arguments varied; the same call where it has none."""
    arguments, keywords = list(base["arguments"]), dict(base["keywords"])
    places: list[Place] = [("arguments", n) for n in range(len(arguments))]
    places += [("keywords", name) for name in keywords]
    for kind, place in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        held: Any = arguments if kind == "arguments" else keywords
        held[place] = varied(held[place], _seen(own, kind, place), rng)
    return {"target": base["target"], "arguments": arguments, "keywords": keywords}


def _seen(own: Sequence[Call], kind: str, place: int | str) -> list[Any]:
    """Return what recorded calls had at a place."""
    if isinstance(place, int):
        return [call[kind][place] for call in own if place < len(call[kind])]
    return [call[kind][place] for call in own if place in call[kind]]


def varied(value: Any, seen: Sequence[Any], rng: random.Random) -> Any:
    """Return tagged JSON of the same type as a value, made of what was seen in its place."""
    same = [one for one in seen if type_of(one) == type_of(value)] or [value]
    made = rng.choice(same)
    if rng.random() < 0.5:
        return made
    match type_of(value):
        case "int":
            whole = [decode(one) for one in same]  # large ones are tagged
            return encode(rng.randint(min(whole), max(whole)))
        case "float":
            finite = [one for one in same if isinstance(one, float)]
            return _between(min(finite), max(finite), rng) if finite else made
        case "str":
            return _text(same, rng) or made
        case "list":
            return {"list": _items([one["list"] for one in same], rng)}
        case "tuple" | "dict" as kind:
            return {kind: _by_place(made[kind], [one[kind] for one in same], rng)}
    return made


def type_of(value: Any) -> str:
    """Return the type that tagged JSON stands for.

    >>> [type_of(one) for one in (True, 1, None, {"list": []})]
    ['bool', 'int', 'NoneType', 'list']
    """
    if isinstance(value, Mapping) and len(value) == 1:
        return str(next(iter(value)))
    return type(value).__name__


def _between(least: float, most: float, rng: random.Random) -> float:
    """Return a number within bounds, of few digits where they allow it."""
    return min(max(round(rng.uniform(least, most), 3), least), most)


def _text(same: Sequence[str], rng: random.Random) -> str:
    """Return the beginning of one text and the end of another."""
    first, second = rng.choice(same), rng.choice(same)
    return first[: rng.randint(0, len(first))] + second[rng.randint(0, len(second)) :]


def _items(lists: Sequence[list[Any]], rng: random.Random) -> list[Any]:
    """Return a list as long as some list, of items that lists have."""
    items = [item for one in lists for item in one]
    lengths = [len(one) for one in lists]
    count = rng.randint(min(lengths), max(lengths))
    return [rng.choice(items) for _ in range(count)] if items else []


def _by_place(made: list[Any], others: Sequence[list[Any]], rng: random.Random) -> list[Any]:
    """Return items of which each is from the same place of one with as many; keys of dicts stay."""
    alike = [one for one in others if len(one) == len(made)]
    found = list(made)
    for place, item in enumerate(made):
        other = rng.choice(alike)[place]
        if isinstance(item, list):  # a key and its value
            found[place] = other if other[0] == item[0] else item
        elif type_of(other) == type_of(item):
            found[place] = other
    return found


def _key(call: Call) -> str:
    return json.dumps([call["arguments"], call["keywords"]], sort_keys=True)


MOST_LOST = 12
"""Calls that may end or hang their box before the rest of a package's inputs is given up."""

CALLS_S = 30.0
RUNS = 5
"""Boxes that answer each call."""

TRIED = 3
"""Generated inputs that are tried for each that is wanted."""

MOST_OF_TARGET = 8
NOTHING = {"returned": None}
Call = dict[str, Any]
Answers = dict[int, Mapping[str, Any]]


def calls_of(functions: Mapping[int, Function], inputs: Mapping[int, Sequence[Any]]) -> list[Call]:
    """Return the recorded calls, in order of the functions."""
    return [
        {"target": functions[number].target, "arguments": arguments, "keywords": keywords}
        for number in sorted(inputs)
        if number in functions
        for arguments, keywords in inputs[number]
    ]


async def cases_of(
    sandbox: Sandbox, package: Package, calls: Sequence[Call], limits: MakingLimits
) -> dict[str, list[HiddenCase]]:
    """Return the cases of each target whose outcomes agree. Waits for boxes, one at a time.

    Besides the recorded calls these have `limits.generated` others that the original returns from.
    """
    recorded = await _compared(sandbox, package, calls, limits)
    steady = recorded.steady()
    steady_calls = [call for call in calls if call["target"] in steady]
    others = generated_calls(steady_calls, TRIED * limits.generated)
    made = await _compared(sandbox, package, others, limits)
    found = {
        target: with_generated(cases, made.cases.get(target, []), limits.generated)
        for target, cases in steady.items()
        if target not in made.unsteady
    }
    return {target: cases for target, cases in found.items() if _tell(cases)}


async def _compared(
    sandbox: Sandbox, package: Package, calls: Sequence[Call], limits: MakingLimits
) -> Compared:
    """Return the cases of some runs in both orders, each with hashes of its own. Waits for boxes.

    The order of a set of two texts, as it is written, is the same in two runs half of the time.
    """
    first = await _answers(sandbox, package, calls, list(range(len(calls))), limits)
    others: list[Answers] = []
    for turn in range(1, RUNS):
        order = sorted(first, reverse=bool(turn % 2))
        others.append(await _answers(sandbox, package, calls, order, limits))
    return compared(calls, first, *others)


def with_generated(
    recorded: Sequence[HiddenCase], made: Sequence[HiddenCase], most: int
) -> list[HiddenCase]:
    """Return recorded cases with at most `most` generated ones between them.

    What the original raises for a generated input is an accident more often than a promise, so only
    what returns is kept; values that no recorded case has come first.
    """
    known = [one.expected for one in recorded]
    kept = sorted(
        (one for one in made if "returned" in one.expected), key=lambda one: one.expected in known
    )
    pairs = zip_longest(recorded, kept[:most])
    return [one for pair in pairs for one in pair if one is not None][:MOST_OF_TARGET]


@dataclass(frozen=True)
class Compared:
    """Cases by target, and the targets of which any outcome differs between runs."""

    cases: Mapping[str, list[HiddenCase]]
    unsteady: frozenset[str]

    def steady(self) -> dict[str, list[HiddenCase]]:
        """Return the cases of the other targets."""
        return {name: cases for name, cases in self.cases.items() if name not in self.unsteady}


def compared(calls: Sequence[Call], first: Answers, *others: Answers) -> Compared:
    """Return the cases of calls that all runs answered; a target that differs is unsteady."""
    found: dict[str, list[HiddenCase]] = {}
    unsteady: set[str] = set()
    for place in sorted(first.keys() & set.intersection(*map(set, others))):
        case = case_of(calls[place], first[place])
        if case is None:
            continue
        found.setdefault(case.target, []).append(case)
        if not all(agrees(case, one[place]) for one in others):
            unsteady.add(case.target)
    return Compared(found, frozenset(unsteady))


def case_of(call: Call, answer: Mapping[str, Any]) -> HiddenCase | None:
    """Return the case of a call and its answer; None where JSON cannot carry the outcome."""
    expected = {kind: answer[kind] for kind in ("returned", "raised") if kind in answer}
    if not expected or expected == {"raised": "builtins.NotImplementedError"}:
        return None
    after = answer.get("arguments")
    return HiddenCase(
        call["target"],
        tuple(call["arguments"]),
        call["keywords"],
        expected,
        None if after is None else tuple(after),
    )


def _tell(cases: Sequence[HiddenCase]) -> bool:
    """Whether a function that does nothing would fail any of the cases."""
    return any(
        one.expected != NOTHING
        or (one.arguments_after is not None and one.arguments_after != one.arguments)
        for one in cases
    )


async def _answers(
    sandbox: Sandbox,
    package: Package,
    calls: Sequence[Call],
    places: Sequence[int],
    limits: MakingLimits,
) -> Answers:
    """Return the outcomes of calls by place; one that ends or hangs its box has none."""
    found: Answers = {}
    waiting = list(places)
    for _ in range(MOST_LOST):
        if not waiting:
            break
        spec: dict[str, Any] = {"imports": list(package.imports), "changed": []}
        spec["calls"] = [calls[place] for place in waiting]
        box = await run_program(
            sandbox, _tree(package), "call_functions", spec, limits.box(CALLS_S)
        )
        values = box.report.of("value")
        found |= {waiting[line["place"]]: line for line in values}
        waiting = waiting[len(values) + 1 :]
    return found


def _tree(package: Package) -> FileTree:
    """Return the tree that the judge's box of values has."""
    tests = tuple(package.test_files)
    task = JudgedTask(package.name, package.files, package.sources, tests, ())
    return FileTree(without_tests(task))
