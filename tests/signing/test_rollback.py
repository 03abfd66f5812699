"""Readers that require signatures never go back to an older version by themselves."""

from pathlib import Path

import pytest

from patchstore.errors import HostError, RollbackRefused, UsageError
from patchstore.format import history, layout
from patchstore.mirror.place import Place
from patchstore.mirror.service import Mirror
from patchstore.serve.desired import DesiredVersion, HeadWatcher
from patchstore.serve.reconcile import Reconciler
from patchstore.serve.vllm_server import VllmServer
from patchstore.signing import KeySigner, RequiredKeys, stored
from patchstore.signing.floor import Floor
from patchstore.stores.memory import MemoryStore
from patchstore.testing.vllm_stub import StubServer, serving
from tests.support.keys import key_pair
from tests.support.manifests import begin_run, commit
from tests.support.weights import Run


class Signed:
    """A run of versions without payloads, all signed."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore("memory://signed")
        self.signer = KeySigner(key_pair(folder)[0])
        self.required = RequiredKeys([self.signer.public_key])
        self.begin("run")

    def begin(self, run_id: str) -> None:
        begin_run(self.store, run_id)

    def commit(self, *versions: int, run_id: str = "run", created_at: str | None = None) -> None:
        header = history.read_header(self.store)
        assert header is not None
        for version in versions:
            commit(self.store, version, run_id, created_at)
            stored.sign_version(self.store, self.signer, header, version)

    def copy(self) -> dict[str, bytes]:
        """The bucket as it is now, which somebody may keep."""
        return {key: self.store.get(key) for key in self.store.list()}

    def put_back(self, copy: dict[str, bytes]) -> None:
        for key in list(self.store.list()):
            self.store.delete(key)
        for key, data in copy.items():
            self.store.put(key, data)

    def desired(self, **options: object) -> DesiredVersion:
        """What another process wants of servers."""
        return DesiredVersion(HeadWatcher(self.store), required=self.required, **options)  # type: ignore[arg-type]


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


def look(desired: DesiredVersion) -> tuple[str, int] | None:
    found = desired.refresh()
    return None if found is None else (found.run_id, found.version)


def test_an_old_state_of_the_bucket_is_refused_by_the_next_process(signed: Signed, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    signed.commit(0, 1)
    old = signed.copy()
    signed.commit(2, 3)
    assert look(signed.desired(floor=Floor(path))) == ("run", 3)
    signed.put_back(old)
    again = signed.desired(floor=Floor(path))
    for _ in range(2):
        with pytest.raises(RollbackRefused, match="version 3 was used before"):
            again.refresh()
    assert again.head is None
    # The trainer goes on where it was.
    signed.commit(2, 3, 4)
    assert look(again) == ("run", 4)


def test_the_operator_may_accept_it_once(signed: Signed, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    signed.commit(0)
    older = signed.copy()
    signed.commit(1)
    old = signed.copy()
    signed.commit(2, 3)
    look(signed.desired(floor=Floor(path)))
    signed.put_back(old)
    accepting = signed.desired(floor=Floor(path), allow_rollback=True)
    assert (look(accepting), accepting.allows_rollback) == (("run", 1), True)
    signed.put_back(older)
    with pytest.raises(RollbackRefused):
        signed.desired(floor=Floor(path)).refresh()
    signed.put_back(old)
    assert look(signed.desired(floor=Floor(path))) == ("run", 1)


def test_another_run_must_be_younger(signed: Signed, tmp_path: Path) -> None:
    floor = Floor(tmp_path / "floor.json")
    signed.commit(0, created_at="2026-05-01T00:00:00.000Z")
    look(signed.desired(floor=floor))
    for run_id, created_at, is_older in (
        ("before", "2026-04-30T23:59:59.999Z", True),
        ("after", "2026-05-01T00:00:00.001Z", False),
    ):
        signed.put_back({})
        signed.begin(run_id)
        signed.commit(0, 1, run_id=run_id, created_at=created_at)
        if is_older:
            with pytest.raises(RollbackRefused, match="of run before, created at"):
                signed.desired(floor=floor).refresh()
        else:
            assert look(signed.desired(floor=floor)) == (run_id, 1)


def test_a_pin_to_an_older_version_needs_the_word(signed: Signed, tmp_path: Path) -> None:
    signed.commit(0, 1, 2, 3)
    floor, pin_file = Floor(tmp_path / "floor.json"), tmp_path / "pin.json"
    desired = signed.desired(floor=floor, pin_file=pin_file)
    assert look(desired) == ("run", 3)
    with pytest.raises(RollbackRefused):
        desired.pin(1)
    assert (desired.pinned, look(desired)) == (None, ("run", 3))
    assert desired.pin(1, allow_rollback=True) == 1
    assert (look(desired), desired.allows_rollback) == (("run", 1), True)
    # The next process keeps the pin, and its word.
    again = signed.desired(floor=Floor(tmp_path / "floor.json"), pin_file=pin_file)
    assert (look(again), again.allows_rollback) == (("run", 1), True)
    again.unpin()
    assert (look(again), again.allows_rollback) == (("run", 3), False)
    with pytest.raises(RollbackRefused):
        signed.desired(floor=floor, at=2).refresh()
    assert look(signed.desired(floor=floor, at=2, allow_rollback=True)) == ("run", 2)
    assert floor.newest is not None and floor.newest.version == 3
    desired.close()
    again.close()


def test_without_keys_nothing_is_remembered(signed: Signed, tmp_path: Path) -> None:
    signed.commit(0, 1, 2)
    floor = Floor(tmp_path / "floor.json")
    desired = DesiredVersion(HeadWatcher(signed.store), floor=floor)
    assert look(desired) == ("run", 2)
    desired.pin(0)
    assert (look(desired), floor.newest) == (("run", 0), None)
    desired.close()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"floor": null}',
        '{"floor": {"run_id": "run", "version": -1, "created_at": "2026-01-01T00:00:00.000Z"}}',
        '{"floor": {"run_id": "run", "version": true, "created_at": "2026-01-01T00:00:00.000Z"}}',
        '{"floor": {"run_id": 3, "version": 1, "created_at": "2026-01-01T00:00:00.000Z"}}',
        '{"floor": {"run_id": "run", "version": 1, "created_at": "yesterday"}}',
        '{"floor": {"run_id": "run", "version": 1, "created_at": 7}}',
    ],
)
def test_a_file_that_says_nothing_ends_the_start_and_is_not_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "floor.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"floor\.json"):
        Floor(path)
    assert path.read_text() == content
    with pytest.raises(UsageError):
        Floor(tmp_path / "none" / "floor.json")


def test_a_version_that_cannot_be_remembered_is_not_desired(
    signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed.commit(0)
    desired = signed.desired(floor=Floor(tmp_path / "floor.json"))
    look(desired)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    signed.commit(1)
    with monkeypatch.context() as patched:
        patched.setattr("patchstore.signing.floor.replace_text", full)
        with pytest.raises(HostError):
            desired.refresh()
    assert look(desired) == ("run", 1)


# Servers.


def test_a_server_tells_a_process_that_remembers_nothing(signed: Signed) -> None:
    signed.commit(0, 1)
    old = signed.copy()
    signed.commit(2)
    with serving(StubServer()) as stub, VllmServer(stub.url, timeout_s=30) as server:
        stub.required_keys = signed.required.names

        def following(**options: object) -> Reconciler:
            desired = signed.desired(**options)
            return Reconciler(
                signed.store,
                server,
                desired=desired.refresh,
                is_signed=True,
                allow_rollback=lambda: desired.allows_rollback,
            )

        first = following()
        assert [first.step().outcome for _ in range(2)] == ["initialised", "applied"]
        signed.put_back(old)
        refused = following().step()
        assert isinstance(refused.error, RollbackRefused) and "serves version 2" in str(refused.error)
        # A driver that does not ask is refused by the server itself.
        with pytest.raises(RollbackRefused):
            server.apply(1)
        assert (stub.held, stub.paused) == (2, False)
        assert following(allow_rollback=True).step().outcome == "applied"
        assert stub.history == [2, 1]


# Mirrors.


def test_a_mirror_goes_back_only_when_told(run: Run, tmp_path: Path) -> None:
    signer = KeySigner(key_pair(tmp_path)[0])
    required = RequiredKeys([signer.public_key])
    run.open(signer=signer)
    run.publish_versions(3)
    run.close()

    def mirrored(**options: object) -> list[int | None]:
        place = Place(tmp_path / "mirror")
        try:
            return [event.version for event in Mirror(run.store, place, required=required, **options).work()]  # type: ignore[arg-type]
        finally:
            place.close()

    assert mirrored() == [2]
    run.store.delete(layout.manifest_key(2))
    with pytest.raises(RollbackRefused):
        mirrored()
    with pytest.raises(RollbackRefused):
        mirrored(at=0)
    assert str((tmp_path / "mirror" / "current").readlink()) == "00000002"
    assert mirrored(at=0, allow_rollback=True) == [0]
    with pytest.raises(RollbackRefused):
        mirrored()
    assert mirrored(allow_rollback=True) == [1]
    assert mirrored() == []
