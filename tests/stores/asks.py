"""One request of each kind, in an order in which all succeed once `a` is there; and all versions of a run."""

from collections.abc import Callable

from patchstore import Replica
from patchstore.stores.base import PART_BYTES
from tests.support.weights import Run, assert_same_bits

OPERATIONS: dict[str, Callable[..., object]] = {
    "put": lambda store, key="a": store.put(key, b"x"),
    "upload": lambda store, key="a": store.upload(key, [bytes(PART_BYTES), b"x"]),
    "get": lambda store, key="a": store.get(key),
    "size": lambda store, key="a": store.size(key),
    "list": lambda store, key="a": list(store.list(key)),
    "read": lambda store, key="a": list(store.read(key)),
    "delete": lambda store, key="a": store.delete(key),
}
READS = {"get", "size", "list", "read"}
OF_OBJECTS = [verb for verb in OPERATIONS if verb != "list"]


def check_versions(run: Run) -> None:
    """Fail unless a reader finds each version, and the first again, with the bits that the trainer had."""
    follower = Replica(run.store, {})
    for version in (*run.history, min(run.history)):
        follower.update(version)
        assert_same_bits(dict(follower.tensors), run.history[version])
