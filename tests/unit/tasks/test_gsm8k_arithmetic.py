"""The arithmetic of GSM8K's annotations: as binary calls in their order, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.tasks.gsm8k_rows import NotArithmetic, append_steps
from composer_mesh.tasks.numbers import Number, calculate
from composer_mesh.tasks.planned import PlannedCall


def chain(text: str) -> tuple[list[PlannedCall], float]:
    """The steps of an expression and the number that its last call gives."""
    steps: list[PlannedCall] = []
    append_steps(text, steps)
    results: list[Number] = []
    for step in steps:
        results.append(calculate(**step.call(results).arguments))
    return steps, float(results[-1])


@pytest.mark.parametrize(
    ("text", "calls", "value"),
    [
        ("2+3*4", 2, 14),
        ("(2+3)*4", 2, 20),
        ("20-5-3", 2, 12),
        ("64/4/2", 2, 8),
        ("64/(4/2)", 2, 32),
        ("-3+5", 1, 2),
        ("+3 - -5", 1, 8),
        ("10-(-(2*3))", 3, 16),
        ("1,200 * 2", 1, 2400),
        (".5*8", 1, 4),
        ("5.*2", 1, 10),
        ("15%*200", 1, 30),
        ("((2))*((3))", 1, 6),
    ],
)
def test_precedence_and_signs_are_those_of_arithmetic(text: str, calls: int, value: float) -> None:
    steps, result = chain(text)
    assert len(steps) == calls
    assert result == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    ["", " ", "3+", "*3", "(3", "3)", "3 4", "x+1", "2**3", "8//2", "3=3", "()", "1/2/", "5 %%",
     "__import__('os')", "(" * 150, "1+" * 150 + "1", "٣+1"],
)  # fmt: skip
def test_what_is_not_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(NotArithmetic):
        append_steps(text, [])


def _expressions() -> st.SearchStrategy[tuple[str, float]]:
    """Texts with their values, built together: no second parser decides what is right."""
    numbers = st.integers(0, 99).map(lambda n: (str(n), float(n)))

    def combine(inner: st.SearchStrategy[tuple[str, float]]) -> st.SearchStrategy[Any]:
        pairs = st.tuples(inner, st.sampled_from("+-*"), inner)
        return pairs.map(lambda p: (f"({p[0][0]}){p[1]}({p[2][0]})", _value(p[0][1], *p[1:])))

    return st.recursive(numbers, combine, max_leaves=6)


def _value(a: float, sign: str, b: tuple[str, float]) -> float:
    return {"+": a + b[1], "-": a - b[1], "*": a * b[1]}[sign]


@given(_expressions())
def test_a_chain_of_calls_computes_what_the_text_says(expression: tuple[str, float]) -> None:
    text, value = expression
    if any(sign in text for sign in "+-*"):
        assert chain(text)[1] == pytest.approx(value)


@given(st.text(alphabet="0123456789.,+-*/()% ", max_size=40))
def test_any_annotation_is_either_steps_or_not_arithmetic(text: str) -> None:
    steps: list[PlannedCall] = []
    try:
        append_steps(text, steps)
    except NotArithmetic:
        return
    assert all(step.tool == "calculator" for step in steps)
