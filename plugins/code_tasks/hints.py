"""Hint templates for what goes wrong in coding tasks; none tells a solution."""

from collections.abc import Mapping

HINTS: Mapping[str, str] = {
    "no_such_file": "There is no {path}. Call list_files to see the paths.",
    "bad_path": "{path} is no path of the repository. Write it from the root, with letters and /.",
    "edit_no_match": (
        "The text is not in {path}. Read the file again and copy the lines exactly, without their "
        "numbers."
    ),
    "edit_ambiguous": (
        "The text is {count} times in {path}. Take more lines around it, so that it occurs once."
    ),
    "patch_failed": "The diff did not apply: {reason}. Read the file again, or use edit.",
    "syntax_error": "Line {line} of {path} is no Python: {message}. Correct it first.",
    "test_failed": "{test} fails: {assertion}. Compare that with what your code returns.",
    "tests_not_run": "The tests could not be run: {assertion}. Look at imports and syntax first.",
    "no_tests": "No tests are shown. Write a test file of your own and run it by its path.",
    "tests_timeout": (
        "The tests took longer than {limit} s. Look for a loop that does not end in your change."
    ),
    "command_timeout": "{command} took longer than {limit} s. Run something smaller.",
    "command_memory": "The program used too much memory. Work with less data at once.",
}
