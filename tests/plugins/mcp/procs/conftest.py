"""What process tests share."""

from process_tests import *  # noqa: F403
