"""Fixtures of tests here."""

from tests.support.commands import patchstore  # noqa: F401 -- fixtures
