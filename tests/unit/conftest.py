"""What unit tests share."""

from unit_tests import *  # noqa: F403
