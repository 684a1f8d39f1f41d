"""What the tests of plugins share with unit tests."""

from unit_tests import *  # noqa: F403
