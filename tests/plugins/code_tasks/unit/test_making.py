"""Making coding tasks: what can be deleted, what is refused, and what counts as proved.

Inputs that are made of recorded ones stay within what was recorded, and are new.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_packages import FILES, SUMS, TEXTS

from composer_mesh.plugins.code_tasks.deletions import with_deletions
from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase
from composer_mesh.plugins.code_tasks.making.features import Feature, Features, chosen
from composer_mesh.plugins.code_tasks.making.functions import BodyCounts, Function, functions_in
from composer_mesh.plugins.code_tasks.making.hidden_cases import (
    calls_of,
    case_of,
    compared,
    generated_calls,
    type_of,
    varied,
    with_generated,
)
from composer_mesh.plugins.code_tasks.making.package import PackageRefused, Survey, package_of
from composer_mesh.plugins.code_tasks.making.rows import proof_of
from composer_mesh.plugins.code_tasks.values import decode, encode

PACKAGE = package_of("small", "1.2", "0" * 64, FILES)


def functions(text: str = SUMS) -> dict[str, Function]:
    found = functions_in("small/sums.py", "small.sums", text.encode())
    return {one.qualname: one for one in found.functions}


def test_a_deletion_keeps_signature_and_docstring_and_takes_the_comments_of_the_body() -> None:
    deleted = with_deletions(SUMS, [functions()["total"].replaced_by("raise NotImplementedError")])
    assert deleted.startswith(
        '"""Sums."""\n\n\ndef total(values, start=0):\n    """Add all values."""\n'
        "    raise NotImplementedError\n\n\ndef upwards"
    )


def test_functions_that_are_too_small_or_say_nothing_are_no_candidates() -> None:
    text = (
        "from typing import overload\n"
        "def one(): return 1\n"
        "@overload\ndef two(a):\n    a\n    b\n    c\n"
        "def three():\n    raise ValueError(\n        1,\n        2,\n    )\n"
        "def four(\n    a): x = [\n    1,\n    2,\n    3]\n"
        "def five(a):\n    '''Doc.'''\n    # only\n    # remarks\n    return a\n"
    )
    assert functions(text) == {}


def test_how_a_function_is_called_is_told_from_its_definition() -> None:
    body = "\n        a = 1\n        b = 2\n        return a + b\n"
    text = (
        "class A:\n"
        f"    def m(self):{body}"
        f"    @staticmethod\n    def s():{body}"
        f"    @classmethod\n    def c(cls):{body}"
        f"    @property\n    def p(self):{body}"
        f"    async def w(self):{body}"
    )
    hows = {name: one.how for name, one in functions(text).items()}
    assert hows == {"A.m": "method", "A.s": "static", "A.c": "class", "A.p": "", "A.w": ""}


def test_a_body_that_stands_twice_is_a_copy_whatever_its_names_are() -> None:
    copies = BodyCounts(FILES)
    found = functions_in("small/texts.py", "small.texts", TEXTS.encode()).functions
    assert {one.qualname: copies.has_copy(one) for one in found} == {
        "shout": False,
        "copied": True,
        "again": True,
    }
    readme = {**FILES, "README.md": TEXTS.replace("\n", "\n   ").encode()}
    assert BodyCounts(readme).has_copy(found[0])


def test_the_tree_of_a_package_has_its_license_and_nothing_that_tells_agents_what_to_do() -> None:
    assert PACKAGE.license == "MIT"
    assert {"LICENSE", "PKG-INFO", "tests/test_small.py"} <= set(PACKAGE.files)
    assert not {"CLAUDE.md", "small.egg-info/top_level.txt"} & set(PACKAGE.files)
    assert (PACKAGE.sources, PACKAGE.imports) == (("small",), (".",))
    assert PACKAGE.source_files() == ["small/__init__.py", "small/sums.py", "small/texts.py"]


def test_modules_below_src_are_imported_from_there() -> None:
    inner = {f"src/{path}": content for path, content in FILES.items() if path.startswith("small/")}
    files = {path: content for path, content in FILES.items() if not path.startswith("small")}
    package = package_of("Small", "1", "", {**files, **inner})
    assert (package.sources, package.imports) == (("src/small",), ("src",))
    assert package.module_of("src/small/sums.py") == "small.sums"
    assert package.module_of("src/small/__init__.py") == "small"


WITHOUT_TESTS = {path: one for path, one in FILES.items() if not path.startswith("tests")}
WITHOUT_LICENSE = {p: one for p, one in FILES.items() if p not in {"LICENSE", "PKG-INFO"}}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (WITHOUT_TESTS, "has no tests"),
        (WITHOUT_LICENSE, "has no license"),
        ({**FILES, "small/fast.pyx": b""}, r"extension modules \(small/fast.pyx\)"),
        ({path: one for path, one in FILES.items() if "small/" not in path}, "no importable"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused_in_one_line(
    files: dict[str, bytes], says: str
) -> None:
    with pytest.raises(PackageRefused, match=says):
        package_of("small", "1.2", "", files)


def test_a_package_that_pytest_needs_is_refused() -> None:
    with pytest.raises(PackageRefused, match="every box has a copy"):
        package_of("Iniconfig", "1", "", FILES, in_boxes=["pytest", "iniconfig"])


def surveyed(reached: dict[int, tuple[str, ...]], **about: Any) -> Survey:
    tests = tuple(sorted({one for those in reached.values() for one in those}))
    defaults: dict[str, Any] = {"inputs": {}, "at_import": frozenset(), "found": 9, "seconds": 1.0}
    return Survey(tests=tests, reached=reached, **{**defaults, **about})


def test_features_are_functions_classes_and_what_one_group_of_tests_reaches() -> None:
    named = dict(enumerate(functions().values()))
    number = {one.qualname: place for place, one in named.items()}
    counter = ("t.py::TestC::test_a", "t.py::TestC::test_b")
    reached = {
        number["total"]: ("t.py::test_total", *counter),
        number["upwards"]: ("u.py::test_up",),
        number["Counter.after"]: counter,
        number["Counter.reset"]: counter[1:],
    }
    found = {one.name: one for one in Features(named, surveyed(reached)).all()}
    assert {name: one.kind for name, one in found.items()} == {
        "small.sums:total": "function",
        "small.sums:upwards": "function",
        "small.sums:Counter.after": "function",
        "small.sums:Counter.reset": "function",
        "small.sums:Counter": "class",
        "t.py": "group",
    }
    assert found["small.sums:Counter.reset"].reaching == counter[1:]
    assert found["small.sums:Counter.reset"].others == (counter[0], "t.py::test_total")


def test_a_property_and_its_setter_are_two_features_with_two_names() -> None:
    text = """
class Path:
    @property
    def kind(self):
        found = self.seen
        found = found or []
        return found

    @kind.setter
    def kind(self, value):
        self.seen = [value]
        self.last = value
        self.count = 1
"""
    both = functions_in("small/paths.py", "small.paths", text.encode()).functions
    named = dict(enumerate(both))
    found = Features(named, surveyed(dict.fromkeys(named, ("t.py::a",)))).all()
    names = [one.name for one in found if one.kind == "function"]
    assert names == [f"small.paths:Path.kind:{one.line}" for one in both]
    assert len(set(names)) == 2


def test_what_runs_at_import_or_is_never_reached_is_no_feature() -> None:
    named = dict(enumerate(functions().values()))
    survey = surveyed({0: ("t.py::a",), 1: ("t.py::b",)}, at_import=frozenset({0}))
    assert [one.numbers for one in Features(named, survey).all()] == [(1,)]


def test_a_limit_takes_the_same_features_each_time() -> None:
    named = dict(enumerate(functions().values()))
    features = Features(named, surveyed(dict.fromkeys(named, ("t.py::a",)))).all()
    assert chosen(features, 2) == chosen(list(features), 2)
    assert len(chosen(features, 2)) == 2
    assert chosen(features, None) == features


FEATURE = Feature("function", "f", (0,), (), ("a", "b", "c"), ("d", "e"))


def runs(**changed: Any) -> dict[str, dict[str, Any]]:
    deleted = {"failed": [0, 1, 2], "passed": [3, 4], "broken": 0}
    told: dict[str, dict[str, Any]] = {
        "empty": deleted,
        "stub": deleted,
        "again": deleted,
        "original": {"failed": [], "passed": [0, 1, 2, 3, 4], "broken": 0},
    }
    return {name: {**run, **changed.get(name, {})} for name, run in told.items()}


def test_a_proof_names_tests_that_miss_the_feature_and_tests_that_do_not() -> None:
    proof = proof_of(FEATURE, runs())
    assert (proof.fail_to_pass, proof.pass_to_pass) == (("a", "b", "c"), ("d", "e"))


def test_tests_that_are_not_alike_are_no_part_of_a_proof() -> None:
    proof = proof_of(
        FEATURE,
        runs(
            stub={"failed": [0, 1], "passed": [2, 3, 4]},
            again={"failed": [0, 1, 2, 3], "passed": [4]},
            original={"passed": [0, 2, 3, 4], "failed": [1]},
        ),
    )
    assert (proof.fail_to_pass, proof.pass_to_pass) == (("a",), ("e",))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"empty": {"failed": []}}, "no test fails on the empty tree"),
        ({"stub": {"failed": []}}, "no test fails on the stub tree"),
        ({"stub": {"broken": 1}}, "the suite does not run on the stub tree"),
        ({"original": {"passed": []}}, "no test fails on the empty and the stub tree alike"),
    ],
)
def test_what_is_not_proved_is_refused(changed: dict[str, Any], says: str) -> None:
    assert proof_of(FEATURE, runs(**changed)).refused == says


def test_a_feature_that_was_not_tried_to_the_end_is_refused() -> None:
    told = runs()
    del told["original"]
    assert "not tried to the end" in proof_of(FEATURE, told).refused


def test_cases_are_recorded_inputs_with_the_outcome_of_the_original() -> None:
    (call,) = calls_of(dict(enumerate(functions().values())), {0: [[[{"list": [1]}], {}]]})
    assert call == {"target": "small.sums:total", "arguments": [{"list": [1]}], "keywords": {}}
    case = case_of(call, {"returned": 1, "arguments": [{"list": [1]}]})
    assert case is not None
    assert (case.expected, case.arguments_after) == ({"returned": 1}, ({"list": [1]},))
    assert case_of(call, {"unencodable": "object"}) is None
    assert case_of(call, {"raised": "builtins.NotImplementedError"}) is None


def test_a_function_that_differs_on_any_input_has_no_cases() -> None:
    calls = [{"target": f"m:{name}", "arguments": [], "keywords": {}} for name in "aab"]
    first = {place: {"returned": 1} for place in range(3)}
    assert counts(compared(calls, first, first).steady()) == {"m:a": 2, "m:b": 1}
    assert set(compared(calls, first, {**first, 1: {"returned": 2}}).steady()) == {"m:b"}
    assert counts(compared(calls, first, {0: first[0]}).steady()) == {"m:a": 1}


def counts(cases: dict[str, list[HiddenCase]]) -> dict[str, int]:
    return {target: len(those) for target, those in cases.items()}


def test_generated_cases_that_return_something_new_come_between_the_recorded_ones() -> None:
    def case(name: str, **expected: Any) -> HiddenCase:
        return HiddenCase("m:f", (name,), {}, expected)

    recorded = [case(f"r{n}", returned=n) for n in range(6)]
    made = [case("g0", returned=0), case("g1", raised="m.E"), case("g2", returned=9)]
    made.append(case("g3", returned=1))
    names = [one.arguments[0] for one in with_generated(recorded, made, 2)]
    assert names == ["r0", "g2", "r1", "g0", "r2", "r3", "r4", "r5"]
    assert with_generated(recorded, made, 0) == recorded


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-50, 50)
    | st.sampled_from([2**60, -(2**70)])
    | st.floats(-5, 5)
    | st.sampled_from([float("inf"), float("nan")])
    | st.text("abc", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("xy", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def call(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    """A recorded call of one function."""
    named = {name: encode(one) for name, one in keywords.items()}
    return {"target": "m:f", "arguments": [encode(one) for one in arguments], "keywords": named}


@given(st.lists(VALUES, min_size=1, max_size=5), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_varied_value_has_the_type_of_the_one_in_its_place(values: list[Any], seed: int) -> None:
    seen = [encode(one) for one in values]
    made = varied(seen[0], seen, random.Random(seed))
    assert type_of(made) == type_of(seen[0])
    assert encode(decode(made)) == made
    same = [one for one in values if type(one) is type(values[0])]
    if type(values[0]) in (int, float) and any(map(math.isfinite, same)):
        finite = [one for one in same if math.isfinite(one)]
        made = decode(made)
        assert min(finite) <= made <= max(finite) or not math.isfinite(made)
    if type(values[0]) is list:
        assert min(map(len, same)) <= len(made["list"]) <= max(map(len, same))
    if type(values[0]) is dict:
        assert decode(made).keys() in [one.keys() for one in same]


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_generated_calls_are_new_and_the_same_each_time(values: list[tuple[Any, Any]]) -> None:
    recorded = [call(first, named=second) for first, second in values]
    made = generated_calls(recorded, 5)
    keys = [json.dumps(one, sort_keys=True) for one in (*recorded, *made)]
    assert len(made) <= 5
    assert len(set(keys)) == len({json.dumps(one, sort_keys=True) for one in recorded}) + len(made)
    assert generated_calls(recorded, 5) == made
    assert generated_calls(recorded, 0) == []


def test_arguments_are_exchanged_between_calls_and_objects_stay_whole() -> None:
    one = {"object": ["m:C", [1], {}]}
    other = {"object": ["m:C", [2], {"x": True}]}
    recorded = [
        {"target": "m:C.f", "arguments": [one, 1], "keywords": {}},
        {"target": "m:C.f", "arguments": [other, 9], "keywords": {}},
    ]
    made = generated_calls(recorded, 8)
    assert made
    assert all(call["arguments"][0] in (one, other) for call in made)
    assert all(1 <= call["arguments"][1] <= 9 for call in made)


@pytest.mark.parametrize("recorded", [[call()], [call(1)], [call(True), call(None)]])
def test_what_cannot_be_varied_has_no_generated_calls(recorded: list[dict[str, Any]]) -> None:
    assert generated_calls(recorded, 4) == []
