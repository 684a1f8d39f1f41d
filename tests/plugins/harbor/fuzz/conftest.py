"""What fuzz tests share."""

from fuzz_tests import *  # noqa: F403
