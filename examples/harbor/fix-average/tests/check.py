"""The program prints the mean of its arguments, and 0 for none."""

import subprocess


def printed(*numbers):
    command = ["python3", "/app/average.py", *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


assert printed(2, 4, 9) == "5.0", printed(2, 4, 9)
assert printed(7) == "7.0", printed(7)
assert printed() == "0", printed()
