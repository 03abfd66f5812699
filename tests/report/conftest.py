"""Fixtures of tests here."""

from tests.support.commands import patchstore, started  # noqa: F401 -- fixtures
