import pytest

from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.store import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


def test_the_same_name_is_the_same_store() -> None:
    open_store("memory://a-name-of-its-own").put("key", b"x")
    assert open_store("memory://a-name-of-its-own").get("key") == b"x"
    assert list(open_store("memory://another-name").list()) == []
