"""The kept faults: each can be put into the source as it is now, in exactly one place."""

from pathlib import Path

import pytest
from edits import Mutation, UnusableEdit, mutations_of, placed, sets_of, sources
from run import FAILED, by_distance

ROOT = Path(__file__).parents[3]
MODULE = Path("losses/sum.py")
TEXT = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a + a\n"


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    return sources(ROOT)


def mutation(find: str, replace: str) -> Mutation:
    return Mutation("a_fault", "Sums are wrong.", find, replace)


@pytest.mark.plugins
@pytest.mark.parametrize("name", sets_of())
def test_each_fault_is_in_one_place_and_is_python(name: str, texts: dict[Path, str]) -> None:
    for one in mutations_of(name):
        path, changed = placed(one, texts)
        assert changed != texts[path], one.name


def test_no_two_faults_have_one_name() -> None:
    names = [one.name for name in sets_of() for one in mutations_of(name)]
    assert sorted(names) == sorted(set(names))


def test_there_are_thirty_faults_of_the_core_and_five_of_each_side_product() -> None:
    counts = {name: len(mutations_of(name)) for name in sets_of()}
    assert counts.pop("core") == 30
    assert set(counts.values()) == {5}


@pytest.mark.parametrize(
    ("find", "replace", "reason"),
    [
        ("return a * b", "return a", "0 times"),
        ("return a +", "return a -", "2 times"),
        ("return a + b", "return a +", "is not Python"),
        ("return a + b", "return (a + b)", "changes nothing"),
    ],
)
def test_a_fault_that_does_not_fit_the_code_is_an_error(
    find: str, replace: str, reason: str
) -> None:
    with pytest.raises(UnusableEdit, match=reason):
        placed(mutation(find, replace), {MODULE: TEXT})


def test_a_fault_without_a_sentence_is_an_error(tmp_path: Path) -> None:
    lines = ["[[mutation]]", 'name = "a"', 'find = "b"', 'replace = "c"']
    (tmp_path / "few.toml").write_text("\n".join(lines))
    with pytest.raises(UnusableEdit, match=r"mutation 1 of few\.toml"):
        mutations_of("few", tmp_path)


def test_whole_lines_may_begin_below_the_quotes() -> None:
    _, changed = placed(mutation("\n    return a + b\n", "\n    return a - b\n"), {MODULE: TEXT})
    assert changed == TEXT.replace("a + b", "a - b")


def test_the_tests_near_a_faulty_module_run_first() -> None:
    folder = ROOT / "tests" / "unit"
    tests = [folder / "mesh/test_waiting.py", folder / "losses/test_losses_grpo.py"]
    assert by_distance(tests, Path("losses/grpo.py"))[0] == tests[1]
    assert by_distance(tests, Path("mesh/waiting.py"))[0] == tests[0]


def test_failed_tests_are_read_from_what_pytest_says() -> None:
    said = (
        "FAILED tests/unit/a/test_a.py::test_b[1 - x] - AssertionError: no - 3\n"
        "ERROR tests/unit/test_c.py - ImportError: d\n"
        "ERROR tests/unit/test_c.py::test_e\n"
    )
    names = ["test_a.py::test_b[1 - x]", "test_c.py", "test_c.py::test_e"]
    assert [one.rpartition("/")[2] for one in FAILED.findall(said)] == names
