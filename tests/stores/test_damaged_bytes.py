"""One bit of a body changes on its way to the store, over plain HTTP: nothing of that is acknowledged."""

import os
from collections.abc import Callable

import pytest

from patchstore.bucket import history, notes
from patchstore.bucket.notes import ReplicaMark
from patchstore.errors import NotFound, PublishFailed, StoreUnavailable
from patchstore.ops.doctor import examine
from patchstore.stores import layout
from patchstore.stores.base import PART_BYTES, Store
from patchstore.stores.memory import MemoryStore
from patchstore.stores.s3_s3fs import DAMAGED
from tests.stores.asks import check_versions
from tests.stores.lost_answers import Place, Request, changed
from tests.support.copies import objects_of
from tests.support.weights import Run

MANIFEST = f"/{layout.manifest_key(2)}"


@pytest.fixture(params=["ministack", "seaweedfs"])
def comparing(request: pytest.FixtureRequest, s3_url: str, client: str) -> Place:
    """A service that compares a body with its checksum."""
    return Place(s3_url, {**request.getfixturevalue(f"{request.param}_options"), "client": client})


@pytest.fixture
def unchecked(s3: Place) -> Place:
    """One that does not: moto. Unlike S3, it repeats the checksum that was sent where a part is asked for."""
    return Place(s3.url, s3.options | {"config_kwargs": {"response_checksum_validation": "when_required"}})


class _Damaging(MemoryStore):
    """A bit changes of the first objects that are created only once, and of the first answers to reads."""

    def __init__(self, created: int = 0, answers: int = 0) -> None:
        super().__init__()
        self.created, self.answers, self.num_puts = created, answers, 0

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.num_puts += 1
        if if_absent and self.created:
            self.created -= 1
            data = changed(data)
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        if self.answers:
            self.answers -= 1
            return changed(data)
        return data


# A service that compares.


@pytest.mark.parametrize("kind", ["put", "create-only put", "upload"])
def test_a_damaged_body_is_refused_and_sent_again(comparing: Place, kind: str) -> None:
    data = os.urandom(2 * PART_BYTES + 9 if kind == "upload" else 10_000)
    damaged: list[Request] = []

    def is_damaged(request: Request) -> bool:
        if request.method != "PUT" or damaged:
            return False
        damaged.append(request)
        return True

    with comparing.through(is_damaged=is_damaged) as store:
        if kind == "upload":
            try:
                store.upload("a", [data])
            except StoreUnavailable:
                # obstore cannot send one part again; publishers send the object again.
                store.upload("a", [data])
        else:
            store.put("a", data, if_absent=kind != "put")
        assert store.get("a") == data
    assert damaged


def test_what_is_always_damaged_is_not_stored(comparing: Place) -> None:
    with comparing.through(is_damaged=lambda request: request.method == "PUT", timeout_s=2) as store:
        with pytest.raises(StoreUnavailable):
            store.put("a", b"x" * 100, if_absent=True)
        with pytest.raises(StoreUnavailable):
            store.upload("a", [b"x"])
        with pytest.raises(NotFound):
            store.get("a")


def said_of_bodies(place: Place) -> set[str]:
    """What the doctor finds about them."""
    options = {name: place.options[name] for name in ("endpoint_url", "key", "secret", "client")}
    found = examine(place.url, (), storage_options=options, num_bytes=1_000_000)
    return {each.kind for each in found} & {"body-check", "body-unchecked"}


def test_the_doctor_says_that_it_compares(comparing: Place) -> None:
    assert said_of_bodies(comparing) == {"body-check"}


# One that does not.


def test_the_doctor_warns_of_a_service_that_does_not(s3: Place) -> None:
    assert said_of_bodies(s3) == {"body-unchecked"}


def test_the_doctor_sends_the_checksum_that_the_client_sends(s3: Place) -> None:
    with s3.behind() as (store, asked):
        store.put("sent", DAMAGED)
        assert store.takes_damage("probe")
    sent, probe = (
        {name: value for name, value in request.headers.items() if name.lower().startswith("x-amz-checksum-")}
        for request in asked
        if request.method == "PUT"
    )
    assert sent == probe
    assert len(sent) == 1


@pytest.mark.parametrize("is_alone", [True, False], ids=["moto", "and the answer is lost"])
def test_a_manifest_that_was_damaged_is_replaced_before_the_version_is_acknowledged(
    unchecked: Place, is_alone: bool
) -> None:
    damaged, lost = [1], [] if is_alone else [1]

    def is_manifest(request: Request, left: list[int]) -> bool:
        return request.method == "PUT" and request.path.endswith(MANIFEST) and bool(left and left.pop())

    with unchecked.through(
        is_damaged=lambda request: is_manifest(request, damaged),
        is_lost=lambda request: is_manifest(request, lost),
    ) as store:
        run = Run(store)
        published = run.publish_and_close(4, anchor_every=100)
        assert [each.kind for each in published] == ["anchor", "delta", "delta", "delta"]
        check_versions(run)
    assert not damaged
    assert not lost


def test_a_manifest_that_is_always_damaged_is_no_version_and_the_publisher_goes_on_after_it(
    unchecked: Place,
) -> None:
    is_damaging = [False]

    def is_damaged(request: Request) -> bool:
        return is_damaging[0] and request.method == "PUT" and request.path.endswith(MANIFEST)

    with unchecked.through(is_damaged=is_damaged) as store:
        run = Run(store)
        run.open(anchor_every=100)
        run.publish_versions(2)
        is_damaging[0] = True
        said = r"00000002\.json is stored with other bytes .*https://.*doctor"
        with pytest.raises(PublishFailed, match=said):
            run.publish()
        is_damaging[0] = False
        run.train()
        assert run.publish().version == 2
        run.train()
        assert run.publish().version == 3
        run.close()
        check_versions(run)


# What is created only once, in any store.

MARK = ReplicaMark(source="s3://b/r", run_id="a" * 32, created_at="2026-01-01T00:00:00.000Z")
CREATES: dict[str, Callable[[Store], object]] = {
    "a record": lambda store: notes.append(
        store, layout.tag_prefix("best"), b'{"version": 1, "tag": "best"}'
    ),
    "a mark": lambda store: notes.create_mark(store, MARK),
}


@pytest.mark.parametrize("kind", CREATES)
def test_all_that_is_created_only_once_is_read_back(kind: str) -> None:
    plain, store = MemoryStore(), _Damaging(created=1)
    CREATES[kind](plain)
    CREATES[kind](store)
    assert not store.created
    assert objects_of(store) == objects_of(plain)


def test_an_answer_that_was_damaged_is_read_again_and_nothing_is_replaced() -> None:
    store = _Damaging(answers=1)
    assert history.create(store, "a", b"some bytes") == b"some bytes"
    assert store.num_puts == 1


def test_what_another_writer_created_is_never_replaced() -> None:
    store = _Damaging()
    store.put("a", b"the other's")
    for answers in (0, 1):
        store.answers = answers
        assert history.create(store, "a", b"my own") != b"my own"
    assert store.get("a") == b"the other's"


def test_a_parent_whose_answer_was_damaged_does_not_end_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("patchstore.stores.tries.FIRST_PAUSE_S", 0.001)
    store = MemoryStore()
    run = Run(store)
    run.publish_versions(2)
    get, damaged = store.get, iter([True])

    def damaging(key: str, start: int = 0, end: int | None = None) -> bytes:
        data = get(key, start, end)
        return changed(data) if key == layout.manifest_key(1) and next(damaged, False) else data

    monkeypatch.setattr(store, "get", damaging)
    assert run.publish().version == 2
    run.close()
    assert not next(damaged, False)
