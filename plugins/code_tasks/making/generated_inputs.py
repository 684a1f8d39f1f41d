"""Inputs of functions made of recorded ones, so that no test shows what a hidden case calls.

An argument is exchanged for one that another call had in its place, or varied within what all calls
had there: the types, the bounds of numbers and the lengths of lists stay. So a right function may
be expected to take it; only the original says whether it does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_mesh.plugins.code_tasks.values import decode, encode

LONGEST_INPUT = 3000
TRIES = 10
"""Draws for each input that is wanted; most functions with few recorded calls allow fewer."""

Call = dict[str, Any]
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
