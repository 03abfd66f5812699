"""What every store must do, as a class of tests: subclass it, and give it a `store` fixture.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(...)  # empty, and the test's own

        def other_process(self, store):
            return store.url, {}  # how another process opens it; None where none can

That is a backend's whole test of the contract in `stores/base.py`.
"""

import json
import random
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import IO, Any, cast

import pytest

from patchstore.errors import AlreadyExists, NotFound, UsageError
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk, Store

_NUM_RACERS = 8
_NUM_PROCESSES = 2
_NUM_ROUNDS = 10


_RACER = """
import json, sys
from patchstore.errors import AlreadyExists
from patchstore.stores import open_store
url, options, me = json.loads(sys.argv[1])
store = open_store(url, **options)
print("ready", flush=True)
for line in sys.stdin:
    try:
        store.put(line.strip(), me.encode(), if_absent=True)
        print("won", flush=True)
    except AlreadyExists:
        print("lost", flush=True)
"""
"""A process that is told a key at a time, and says whether it created it."""


def pattern(start: int, end: int) -> bytes:
    """Bytes `start` to `end` of an endless object in which every 8 bytes say where they are."""
    first = start // 8
    words = array("Q", range(first, (end + 7) // 8)).tobytes()
    return words[start - 8 * first : end - 8 * first]


def patterned(size: int) -> Iterator[bytes]:
    """The pattern's first `size` bytes, in chunks that are no divisor of a part."""
    step = 3_000_008
    for offset in range(0, size, step):
        yield pattern(offset, min(offset + step, size))


class ProducerError(Exception):
    """What a test's chunks raise."""


class StoreConformance:
    """Tests of the contract in `stores/base.py`."""

    reads_with = "get"
    """The store's method that brings each part of a `read`."""
    tells_time = True
    """Whether it says when an object was stored."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store that no other test uses."""
        raise NotImplementedError

    def other_process(self, store: Store) -> tuple[str, dict[str, Any]] | None:
        """URL and options with which another process opens the same store, or None where it cannot."""
        return None

    # get, size, put

    def test_what_was_put_is_got(self, store: Store) -> None:
        data = bytes(range(256)) * 5
        store.put("versions/00000000.json", data)
        assert store.get("versions/00000000.json") == data
        assert store.size("versions/00000000.json") == len(data)

    def test_a_put_replaces_the_object(self, store: Store) -> None:
        store.put("head.json", b"a longer first")
        store.put("head.json", b"second")
        assert store.get("head.json") == b"second"
        assert store.size("head.json") == 6

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.put("empty", b"")
        store.upload("also/empty", [])
        for key in ("empty", "also/empty"):
            assert store.get(key) == b""
            assert store.get(key, 0, 0) == b""
            assert store.get(key, 0, 10) == b""
            assert store.get(key, 3) == b""
            assert store.size(key) == 0
            assert list(store.read(key)) == []
        assert list(store.list()) == ["also/empty", "empty"]

    def test_it_says_when_an_object_was_put_or_always_that_it_does_not_know(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.stored_at("first")
        store.put("first", b"1")
        store.put("second", b"2", if_absent=True)
        first, second = store.stored_at("first"), store.stored_at("second")
        if not self.tells_time:
            assert (first, second) == (None, None)
            return
        assert first is not None and second is not None
        assert first.tzinfo is not None and first <= second
        store.put("first", b"1")
        again = store.stored_at("first")
        assert again is not None and again >= second

    def test_a_range_is_cut_at_the_objects_size(self, store: Store) -> None:
        data = b"0123456789"
        store.put("ten", data)
        for start in (0, 3, 9, 10, 12):
            for end in (start, start + 1, 10, 12, 99, None):
                if end is None or start <= end:
                    assert store.get("ten", start, end) == data[start:end]
                    assert b"".join(store.read("ten", start=start, end=end)) == data[start:end]

    def test_a_range_from_the_end_or_backwards_is_refused(self, store: Store) -> None:
        store.put("ten", b"0123456789")
        for start, end in ((-1, None), (0, -1), (5, 4)):
            with pytest.raises(UsageError) as caught:
                store.get("ten", start, end)
            assert caught.value.kind == "usage"
            with pytest.raises(UsageError):
                next(store.read("ten", start=start, end=end))

    def test_what_is_missing_is_not_found(self, store: Store) -> None:
        store.put("folder/object", b"x")
        for key in ("nothing", "folder", "folder/nothing", "folder/object/below"):
            for ask in (
                lambda key=key: store.get(key),
                lambda key=key: store.get(key, 2, 2),
                lambda key=key: store.get(key, 2, 5),
                lambda key=key: store.size(key),
                lambda key=key: next(store.read(key)),
                lambda key=key: next(store.read(key, end=2 * PART_BYTES)),
            ):
                with pytest.raises(NotFound) as caught:
                    ask()
                assert caught.value.kind == "not-found"

    def test_what_is_no_key_is_refused_by_every_verb(self, store: Store) -> None:
        for key in ("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a b", "a\\b", "ä", "a\n"):
            for ask in (
                lambda key=key: store.get(key),
                lambda key=key: store.size(key),
                lambda key=key: store.put(key, b""),
                lambda key=key: store.put(key, b"", if_absent=True),
                lambda key=key: store.delete(key),
                lambda key=key: store.upload(key, [b""]),
                lambda key=key: next(store.read(key)),
            ):
                with pytest.raises(UsageError) as caught:
                    ask()
                assert caught.value.kind == "usage"
        assert list(store.list()) == []

    # create-only

    def test_a_create_only_put_takes_a_free_key(self, store: Store) -> None:
        store.put("versions/00000001.json", b"mine", if_absent=True)
        assert store.get("versions/00000001.json") == b"mine"

    def test_a_create_only_put_leaves_a_taken_key_as_it_is(self, store: Store) -> None:
        store.put("slot", b"first")
        with pytest.raises(AlreadyExists) as caught:
            store.put("slot", b"second", if_absent=True)
        assert caught.value.kind == "already-exists"
        assert store.get("slot") == b"first"

    def test_a_deleted_key_can_be_created_again(self, store: Store) -> None:
        store.put("slot", b"first", if_absent=True)
        store.delete("slot")
        store.put("slot", b"second", if_absent=True)
        assert store.get("slot") == b"second"

    def test_of_threads_that_race_for_a_key_one_wins(self, store: Store) -> None:
        start = Barrier(_NUM_RACERS)

        def race(racer: int, key: str) -> bool:
            start.wait()
            try:
                store.put(key, b"racer %d" % racer, if_absent=True)
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(_NUM_RACERS) as pool:
            for turn in range(_NUM_ROUNDS):
                key = f"race/{turn}"
                won = list(pool.map(race, range(_NUM_RACERS), [key] * _NUM_RACERS))
                assert won.count(True) == 1
                assert store.get(key) == b"racer %d" % won.index(True)

    def test_of_processes_that_race_for_a_key_one_wins(self, store: Store) -> None:
        opening = self.other_process(store)
        if opening is None:
            pytest.skip("no other process can open this store")
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", _RACER, json.dumps([*opening, f"process {me}"])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for me in range(_NUM_PROCESSES)
        ]

        def answers_of_all() -> list[str]:
            return [cast("IO[str]", racer.stdout).readline().strip() for racer in racers]

        try:
            assert answers_of_all() == ["ready"] * _NUM_PROCESSES
            for turn in range(_NUM_ROUNDS):
                for racer in racers:
                    print(f"race/{turn}", file=racer.stdin, flush=True)
                answers = answers_of_all()
                assert Counter(answers) == {"won": 1, "lost": _NUM_PROCESSES - 1}
                assert store.get(f"race/{turn}").decode() == f"process {answers.index('won')}"
        finally:
            for racer in racers:
                racer.communicate()

    # list, delete

    def test_a_listing_is_in_ascending_order_of_keys(self, store: Store) -> None:
        # In the order of folders `a/b` would come before `a-b`; '-' and '.' sort before '/'.
        keys = ["a-b", "a.b", "a/b", "a/b.c", "a/c/d", "a0", "b", "versions/00000010.json"]
        for key in reversed(keys):
            store.put(key, b"")
        assert list(store.list()) == sorted(keys)

    def test_a_prefix_is_a_string_and_not_a_folder(self, store: Store) -> None:
        versions = [f"versions/{version:08d}.json" for version in (1, 2, 10)]
        keys = ["deltas/1-a/x", *versions, "versions2"]
        for key in keys:
            store.put(key, b"")
        for prefix in ("", "v", "versions", "versions/", "versions/0000000", keys[3], "d", "nothing/x"):
            assert list(store.list(prefix)) == [key for key in keys if key.startswith(prefix)]

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list()) == []
        assert list(store.list("versions/")) == []

    def test_what_begins_no_key_is_no_prefix(self, store: Store) -> None:
        for prefix in ("/", "//", "../", "a//", "a b"):
            with pytest.raises(UsageError):
                list(store.list(prefix))

    def test_what_is_deleted_is_gone(self, store: Store) -> None:
        store.put("a/b", b"")
        store.put("a/c", b"")
        store.delete("a/b")
        assert list(store.list()) == ["a/c"]
        with pytest.raises(NotFound):
            store.get("a/b")

    def test_deleting_what_is_not_there_is_no_error(self, store: Store) -> None:
        store.put("a/b", b"x")
        for key in ("nothing", "a", "a/nothing", "a/b/c"):
            store.delete(key)
        assert store.get("a/b") == b"x"

    # upload, read

    def test_chunks_of_odd_sizes_become_one_object(self, store: Store) -> None:
        chunks: list[Chunk] = [
            b"",
            b"1",
            memoryview(b"23"),
            bytearray(b"456"),
            b"",
            random.Random(1).randbytes(100_003),
        ]
        store.upload("odd", chunks)
        assert store.get("odd") == b"".join(chunks)

    @pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
    def test_an_object_may_end_where_a_part_ends(self, store: Store, size: int) -> None:
        data = random.Random(size).randbytes(1 << 16) * (size // (1 << 16) + 1)
        store.upload("edge", [data[:size]])
        assert store.size("edge") == size
        assert b"".join(store.read("edge")) == data[:size]

    def test_an_object_larger_than_a_transfers_memory_comes_back_in_order_and_bounded(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = (NUM_PARTS + 1) * PART_BYTES + 12_345
        store.upload("large", patterned(size))
        assert store.size("large") == size
        assert store.get("large", size - 5) == pattern(size - 5, size)
        get, asked = getattr(store, self.reads_with), []

        def counting(*args: Any) -> bytes:
            asked.append(args)
            part: bytes = get(*args)
            return part

        monkeypatch.setattr(store, self.reads_with, counting)
        offset, most = 0, 0
        for num_consumed, part in enumerate(store.read("large")):
            most = max(most, len(asked) - num_consumed)
            assert part == pattern(offset, offset + len(part))
            offset += len(part)
        assert offset == size
        assert len(asked) == NUM_PARTS + 2
        assert most <= NUM_PARTS

    def test_a_producer_may_reuse_its_buffer(self, store: Store) -> None:
        def chunks() -> Iterator[Chunk]:
            buffer = bytearray(PART_BYTES // 2)
            for number in range(5):
                buffer[:] = bytes([number]) * len(buffer)
                yield memoryview(buffer)

        store.upload("reused", chunks())
        expected = b"".join(bytes([number]) * (PART_BYTES // 2) for number in range(5))
        assert b"".join(store.read("reused")) == expected

    def test_an_upload_replaces_the_object(self, store: Store) -> None:
        store.put("object", b"a longer first")
        store.upload("object", [b"sec", b"ond"])
        assert store.get("object") == b"second"

    @pytest.mark.parametrize("size", [10, 3 * PART_BYTES])
    def test_an_upload_whose_chunks_raise_leaves_nothing(self, store: Store, size: int) -> None:
        def chunks() -> Iterator[bytes]:
            yield bytes(size)
            assert list(store.list()) == []
            raise ProducerError

        with pytest.raises(ProducerError):
            store.upload("failed", chunks())
        assert list(store.list()) == []
        with pytest.raises(NotFound):
            store.size("failed")

    def test_an_upload_whose_chunks_raise_leaves_the_object_that_was_there(self, store: Store) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"new"
            raise ProducerError

        store.put("object", b"old")
        with pytest.raises(ProducerError):
            store.upload("object", chunks())
        assert store.get("object") == b"old"

    @pytest.mark.parametrize("size", [0, 10, PART_BYTES, 2 * PART_BYTES + 7])
    def test_an_object_is_read_into_memory(self, store: Store, size: int) -> None:
        store.upload("object", patterned(size))
        for room in {size, size + 5, size // 2}:
            memory = bytearray(b"x" * room)
            num = min(size, room)
            assert store.read_into("object", memoryview(memory)) == num
            assert memory == pattern(0, num) + b"x" * (room - num)
        with pytest.raises(NotFound):
            store.read_into("nothing", memoryview(bytearray(3)))

    def test_a_reader_may_stop_early(self, store: Store) -> None:
        store.upload("large", patterned(3 * PART_BYTES))
        parts = cast("Generator[bytes, None, None]", store.read("large"))
        assert next(parts) == pattern(0, PART_BYTES)
        parts.close()

    def test_readers_never_see_half_an_object(self, store: Store) -> None:
        contents = [bytes([number]) * (300_000 + number) for number in range(6)]
        done = Event()
        store.put("object", contents[0])

        def read_on() -> list[bytes]:
            seen = [store.get("object")]
            while not done.is_set():
                seen.append(store.get("object"))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read_on) for _ in range(2)]
            try:
                for number, content in enumerate(contents):
                    store.put("object", content)
                    store.upload("object", [content[:100_000], content[100_000:]])
                    store.put(f"fresh/{number}", content, if_absent=True)
                    assert store.get(f"fresh/{number}") == content
            finally:
                done.set()
            seen = [data for reader in readers for data in reader.result()]
        assert all(data in contents for data in seen)
