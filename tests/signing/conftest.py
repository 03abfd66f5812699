"""A key, and what requires it."""

from pathlib import Path

import pytest

from patchstore.signing import KeySigner, RequiredKeys
from tests.support.commands import patchstore  # noqa: F401 -- fixtures
from tests.support.keys import key_pair


@pytest.fixture
def signer(tmp_path: Path) -> KeySigner:
    return KeySigner(key_pair(tmp_path)[0])


@pytest.fixture
def required(signer: KeySigner) -> RequiredKeys:
    return RequiredKeys([signer.public_key])
