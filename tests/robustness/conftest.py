"""What the tests of this folder share."""

import logging

import pytest


@pytest.fixture
def quiet_logging():
    """Puts the log back as it was: a command line in this process sets it up for a process of its own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level
