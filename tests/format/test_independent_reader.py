"""Two readers of one format: the real one, and one written from the page alone."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from blake3 import blake3

from patchstore.apply.replica import Replica
from patchstore.bucket import history
from patchstore.errors import PublishFailed, SchemaMismatch
from patchstore.publish.publisher import Publisher
from patchstore.read import replay
from patchstore.stores import tries
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits, raw_bytes, spec_of
from patchstore.testing.faults import Effect, Fault, FaultyStore
from tests.format import independent_reader
from tests.format.runs import eventful, new_bits, publish, tensors_of_every_dtype
from tests.format.surgery import lay_out
from tests.support.copies import objects_of
from tests.support.weights import Run, State


def as_read(state: State) -> dict[str, independent_reader.Tensor]:
    """Tensors as the independent reader returns them."""
    found = {}
    for name, tensor in state.items():
        spec = spec_of(name, tensor)
        found[name] = (spec.dtype, spec.listed_shape, bytes(raw_bytes(tensor)))
    return found


def in_folder(folder: Path) -> dict[str, independent_reader.Tensor]:
    tensors: dict[str, independent_reader.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= independent_reader.parse_safetensors(path.read_bytes())[1]
    return tensors


def assert_both_readers_agree(bucket: Path, history: dict[int, State], scratch: Path) -> None:
    store = FolderStore(bucket)
    follower = Replica(store, {})
    assert [*history] == [*range(len(history))]
    for version, state in history.items():
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
    assert len(run.history) == 13
    bucket = lay_out(objects_of(store), tmp_path / "bucket")
    assert_both_readers_agree(bucket, run.history, tmp_path / "replayed")


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
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.0)
    failing = Fault(verb="upload", key="deltas/00000002-*", effect=effect, times=tries.ATTEMPTS)
    inner = MemoryStore()
    run = Run(FaultyStore(inner, failing), tensors_of_every_dtype(), None)
    run.open(dtype=None)
    publish(run, None, new_bits(1))
    with pytest.raises(PublishFailed):
        publish(run, new_bits(2))
    publish(run, new_bits(3), new_bits(4))
    run.close()
    recovered = history.read_manifest(inner, 2)
    assert recovered.delta is None
    assert recovered.anchor is not None
    bucket = lay_out(objects_of(inner), tmp_path / "bucket")
    assert_both_readers_agree(bucket, run.history, tmp_path / "replayed")


def test_a_publisher_names_its_parent_by_the_bytes_that_are_stored(tmp_path: Path) -> None:
    """A later release may add fields, and `parent_digest` is over the parent byte for byte."""
    bucket = tmp_path / "bucket"
    run = Run(FolderStore(bucket), {"a": torch.arange(8, dtype=torch.int32)}, None)
    run.open(dtype=None)
    run.publish()
    run.close()
    head = bucket / "versions/00000000.json"
    head.write_bytes(head.read_bytes().replace(b"{", b'{"added_by_a_later_release": [1, 2],', 1))
    run.open(dtype=None, resume=True)
    run.history[1] = run.history[0]
    publish(run, lambda tensors: tensors["a"].add_(1))
    run.close()
    stored = independent_reader.read_manifest(bucket, 1)["parent_digest"]
    assert stored == f"blake3:{blake3(head.read_bytes()).hexdigest()}"
    assert_both_readers_agree(bucket, run.history, tmp_path / "replayed")


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
