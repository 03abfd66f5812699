"""Two readers of one format: the real one, and one written from the page alone."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from blake3 import blake3

from patchstore.apply.replica import Replica
from patchstore.errors import PublishFailed, SchemaMismatch
from patchstore.format import history
from patchstore.publish import uploads
from patchstore.publish.publisher import Publisher
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits, raw_bytes, spec_of
from patchstore.testing.faults import Effect, Fault, FaultyStore
from tests.format import independent_reader
from tests.format.runs import Run, State, eventful, new_bits, tensors_of_every_dtype
from tests.format.surgery import lay_out


def as_read(state: State) -> dict[str, independent_reader.Tensor]:
    """Tensors as the independent reader returns them."""
    found = {}
    for name, tensor in state.items():
        spec = spec_of(name, tensor)
        found[name] = (spec.dtype, spec.shape, bytes(raw_bytes(tensor)))
    return found


def in_folder(folder: Path) -> dict[str, independent_reader.Tensor]:
    tensors: dict[str, independent_reader.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= independent_reader.parse_safetensors(path.read_bytes())[1]
    return tensors


def assert_both_readers_agree(bucket: Path, states: list[State], scratch: Path) -> None:
    store = FolderStore(bucket)
    follower = Replica(store, {})
    for version, state in enumerate(states):
        expected = as_read(state)
        assert independent_reader.rebuild(bucket, version) == expected
        replay.replay(store, version, out=scratch / str(version))
        assert in_folder(scratch / str(version)) == expected
        follower.update(version)
        assert as_read(dict(follower.tensors)) == expected
        assert all(torch.equal(bits(follower.tensors[name]), bits(state[name])) for name in state)


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [("raw", None), ("gap", None), ("gap", torch.bfloat16), ("context", None), ("context", torch.bfloat16)],
)
def test_both_readers_rebuild_what_the_trainer_had(
    tmp_path: Path, encoding: str, dtype: torch.dtype | None
) -> None:
    store = MemoryStore()
    run = eventful(store, encoding, dtype)
    assert len(run.states) == 13
    bucket = lay_out({key: store.get(key) for key in store.list()}, tmp_path / "bucket")
    assert_both_readers_agree(bucket, run.states, tmp_path / "replayed")


def test_an_eventful_run_has_versions_of_every_kind() -> None:
    store = MemoryStore()
    eventful(store, "gap", None)
    manifests = [history.read_manifest(store, version) for version in range(13)]
    kinds = {(m.delta is not None, m.anchor is not None, m.parent == m.version - 1) for m in manifests}
    assert (True, True, True) in kinds  # a periodic anchor
    assert (False, True, True) in kinds  # an anchor behind the head with whatever weights
    assert (True, False, False) in kinds  # a trainer that went back
    assert any(m.delta is not None and not m.delta.payloads for m in manifests)
    assert any(m.anchor is not None and len(m.anchor.payloads) > 1 for m in manifests)


@pytest.mark.parametrize("effect", ["fail-before", "truncate"])
def test_both_readers_rebuild_what_follows_a_failed_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: Effect
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0.0)
    bucket = tmp_path / "bucket"
    failing = Fault(verb="upload", key="deltas/00000002-*", effect=effect, times=uploads.ATTEMPTS)
    inner = MemoryStore()
    store = FaultyStore(inner, failing)
    run = Run(tensors_of_every_dtype(), None)
    with Publisher(store, run.tensors, dtype=None) as publisher:
        run.publish(publisher)
        run.publish(publisher, new_bits(1))
        with pytest.raises(PublishFailed):
            run.publish(publisher, new_bits(2))
        run.publish(publisher, new_bits(3))
        run.publish(publisher, new_bits(4))
    recovered = history.read_manifest(store, 2)
    assert recovered.delta is None
    assert recovered.anchor is not None
    lay_out({key: inner.get(key) for key in inner.list()}, bucket)
    assert_both_readers_agree(bucket, run.states, tmp_path / "replayed")


def test_a_publisher_names_its_parent_by_the_bytes_that_are_stored(tmp_path: Path) -> None:
    """A later release may add fields, and `parent_digest` is over the parent byte for byte."""
    bucket = tmp_path / "bucket"
    run = Run({"a": torch.arange(8, dtype=torch.int32)}, None)
    with Publisher(FolderStore(bucket), run.tensors, dtype=None) as publisher:
        run.publish(publisher)
    head = bucket / "versions/00000000.json"
    head.write_bytes(head.read_bytes().replace(b"{", b'{"added_by_a_later_release": [1, 2],', 1))
    with Publisher(FolderStore(bucket), run.tensors, dtype=None, resume=True) as publisher:
        run.record()
        run.publish(publisher, lambda tensors: tensors["a"].add_(1))
    stored = independent_reader._manifest(bucket, 1)["parent_digest"]
    assert stored == f"blake3:{blake3(head.read_bytes()).hexdigest()}"
    assert_both_readers_agree(bucket, run.states, tmp_path / "replayed")


def test_the_worked_examples_of_the_page_hold() -> None:
    assert independent_reader.sums(b"\1\0", 2) == "09776c6b6230390f03a180016f332d45"
    assert independent_reader.sums(b"", 2) == "0" * 32
    gaps = b"".join(gap.to_bytes(2, "little") for gap in (3, 65535, 65535, 65535, 3388))
    assert independent_reader.positions("gap", "U16", gaps, 200_001) == [3, 65539, 131075, 196611, 200000]


@pytest.mark.parametrize(
    "name",
    ["__metadata__", "", "a\tb", "a\nb", "\ud800"],
    ids=["metadata", "empty", "tab", "newline", "surrogate"],
)
def test_a_name_that_no_tensor_file_can_hold_is_refused_before_a_run_is_created(name: str) -> None:
    store = MemoryStore()
    with pytest.raises(SchemaMismatch):
        Publisher(store, MappingProxyType({name: torch.zeros(3)})).close()
    assert list(store.list("versions/")) == []
    assert list(store.list("store.json")) == []
