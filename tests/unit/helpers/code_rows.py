"""The files and the row of a small coding task."""

SOURCE = b'def double(value):\n    """Doubles."""\n    raise NotImplementedError\n'
RIGHT = SOURCE.replace(b"raise NotImplementedError", b"return 2 * value")
TESTS = b"from lib.sums import double\n\n\ndef test_two():\n    assert double(417) == 834\n"
TEST, OTHER = "tests/test_sums.py::test_two", "tests/test_others.py::test_other"
FILES = {
    "lib/__init__.py": b"",
    "lib/sums.py": SOURCE,
    "tests/test_sums.py": TESTS,
    "tests/test_others.py": b"def test_other():\n    assert True\n",
}
ROW = {
    "name": "double",
    "prompt": "Write double again.",
    "files": {path: text.decode() for path, text in FILES.items()},
    "sources": ["lib"],
    "targets": ["lib.sums:double"],
    "fail_to_pass": [TEST],
    "pass_to_pass": [OTHER],
    "cases": [{"target": "lib.sums:double", "arguments": [3], "expected": {"returned": 6}}],
    "solution": {"lib/sums.py": RIGHT.decode()},
}
