"""Versions in encoding `context`: coded against the parent, exact for everything that can be stored."""

import json
from collections import Counter
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.encodings import CHOICES
from patchstore.encodings import encoding as encoding_named
from patchstore.encodings.context import entries
from patchstore.errors import PublishFailed, StateMismatch, UnsupportedFormat, UsageError
from patchstore.format import history
from patchstore.payloads import delta as delta_module
from patchstore.payloads.tensor_file import open_buffer
from patchstore.read.replay import replay, verify
from patchstore.read.transcode import transcode
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import elements
from patchstore.tensors.bits import TORCH_DTYPES, bits, raw_bytes, spec_of
from tests.format import bucket_edits, surgery
from tests.support.weights import Run, State, assert_same_bits, served

DENSITIES = (0.0, 0.0003, 0.01, 0.2, 0.9, 1.0)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaNs with payloads, infinities and both zeros among them."""
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def newest(store: MemoryStore) -> State:
    tensors: State = {}
    Replica(store, tensors).update()
    return tensors


@pytest.mark.parametrize("encoding", ["context", "auto"])
def test_every_dtype_shape_and_density_arrives(store: MemoryStore, encoding: str) -> None:
    shapes = [(), (1,), (16,), (7,), (48, 64), (33, 50), (3, 32, 48), (0, 4)]
    model = {
        f"{name}.{'x'.join(map(str, shape))}": any_bits(shape, dtype)
        for name, dtype in TORCH_DTYPES.items()
        for shape in shapes
    }
    held: State = {}
    with Publisher(store, model, dtype=None, encoding=encoding, anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
        follower = Replica(store, held)
        follower.update()
        for step, density in enumerate(DENSITIES):
            for tensor in model.values():
                chosen = torch.rand(tensor.shape) < density
                new = bits(any_bits(tuple(tensor.shape), tensor.dtype))
                bits(tensor)[chosen.view(-1)] = new[chosen.view(-1)]
            manifest = publisher.publish_patch(step).result()
            # Integers of which most change take more as changes than whole.
            assert manifest.delta is not None or (encoding == "auto" and density >= 0.9)
            follower.update()
            assert_same_bits(held, model)
    assert_same_bits(newest(store), model)


def test_a_file_has_what_can_be_coded_in_two_entries(store: MemoryStore) -> None:
    model = {"a": torch.randn(64, 64), "b": torch.randn(5), "counts": torch.arange(40)}
    with Publisher(store, model, encoding="context") as publisher:
        publisher.publish_patch(0).result()
        for tensor in model.values():
            tensor[:3] += 1
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None
    assert delta.encoding == "context"
    (wanted,) = delta.payloads
    header, tensors = open_buffer(wanted.key, bytearray(b"".join(store.read(wanted.key))))
    assert tensors.keys() == {"counts.idx", "counts.val", "table", "tiles"}
    assert json.loads(header.metadata["tensors"]).keys() == {"counts"}


def test_what_cannot_be_coded_alone_is_published_as_gaps(store: MemoryStore) -> None:
    model = {"counts": torch.arange(100_000)}
    with Publisher(store, model, encoding="auto") as publisher:
        publisher.publish_patch(0).result()
        model["counts"][[0, 99_999]] += 1
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None
    assert delta.encoding == "gap"
    assert_same_bits(newest(store), model)


def test_a_late_joiner_takes_several_at_once(run: Run) -> None:
    run.open(encoding="context", anchor_every=100)
    run.publish_versions(5)
    tensors: State = {}
    follower = Replica(run.store, tensors)
    follower.update(1)
    follower.update(4)
    assert_same_bits(tensors, run.history[4])


def test_anchors_replay_and_verify(run: Run, tmp_path: Path) -> None:
    run.open(encoding="context", anchor_every=3)
    kinds = [manifest.kind for manifest in run.publish_versions(6)]
    assert kinds == ["anchor", "delta", "delta"] * 2
    for version in range(6):
        verify(run.store, version)
        replay(run.store, version, out=tmp_path / str(version))


def test_a_run_goes_on_in_another_encoding(run: Run) -> None:
    tensors: State = {}
    for encoding in CHOICES:
        run.open(encoding=encoding, resume=bool(run.history), anchor_every=100)
        run.train()
        run.publish()
        run.close()
        Replica(run.store, tensors).update()
        assert_same_bits(tensors, run.history[max(run.history)])


def test_a_follower_whose_tensors_were_written_to_starts_from_an_anchor(run: Run) -> None:
    run.open(encoding="context", anchor_every=100)
    run.publish_versions(3)
    tensors: State = {}
    follower = Replica(run.store, tensors)
    follower.update(1)
    bits(tensors["embed.weight"])[5, ...] ^= 1 << 9
    with pytest.raises(StateMismatch, match="something else wrote"):
        follower.stage(2)
    assert follower.held == 1
    follower.update(2)
    assert_same_bits(tensors, run.history[2])


def test_a_publisher_whose_snapshot_was_written_to_publishes_an_anchor(run: Run) -> None:
    publisher = run.open(encoding="context", anchor_every=100)
    run.publish_versions(2)
    snapshot = publisher._snapshot.tensors["embed.weight"]  # type: ignore[attr-defined]
    bits(snapshot)[7] ^= 1
    with pytest.raises(PublishFailed, match="no longer version 1"):
        publisher.publish_patch(2).result()
    manifest = run.publish()
    assert manifest.kind == "anchor"
    assert_same_bits(newest(run.store), served(run.model))


def test_what_cannot_be_coded_for_lack_of_memory_is_followed_by_an_anchor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise MemoryError("made to fail")

    publisher = run.open(encoding="context", anchor_every=3)
    run.publish()
    with monkeypatch.context() as patched:
        patched.setattr(delta_module, "encode_all", failing)
        run.train()
        with pytest.raises(PublishFailed, match="could not be encoded"):
            publisher.publish_patch(1).result()
        run.train()
        assert (run.publish().kind, run.publish().num_bytes) == ("anchor", 0)
        run.train()
        with pytest.raises(PublishFailed):
            publisher.publish_patch(2).result()
    run.train()
    assert run.publish().kind == "anchor"
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))
    assert len({key.rpartition("/")[0] for key in run.store.list("anchors/")}) == 3


def test_an_anchor_whose_delta_cannot_be_coded_has_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise MemoryError("made to fail")

    run.open(encoding="context", anchor_every=2)
    run.publish_versions(2)
    monkeypatch.setattr(delta_module, "encode_all", failing)
    manifest = run.publish()
    assert manifest.anchor is not None
    assert manifest.delta is None
    assert_same_bits(newest(run.store), served(run.model))


def test_a_publication_starts_no_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    run.open(encoding="context", anchor_every=100)
    run.publish_versions(2)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", failing)
        assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


def test_few_tiles_with_many_changes_are_stored_as_gaps(store: MemoryStore) -> None:
    model = {"few": torch.randn(251, 257), "many": torch.randn(256, 256)}
    with Publisher(store, model, encoding="context") as publisher:
        publisher.publish_patch(0).result()
        for tensor in model.values():
            tensor.mul_(1.5)
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None
    _, tensors = open_buffer("", bytearray(store.get(delta.payloads[0].key)))
    assert tensors.keys() == {"few.idx", "few.val", "table", "tiles"}
    assert_same_bits(newest(store), {name: tensor.bfloat16() for name, tensor in model.items()})


@pytest.mark.parametrize("encoding", ["context", "gap"])
def test_the_work_of_many_small_tensors_is_done_in_few_calls(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    calls: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: object) -> object:
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(module, name, counted)

    model = {
        f"{number:03d}": torch.randn(4, 5, dtype=(torch.bfloat16, torch.float16)[number % 2])
        for number in range(400)
    }
    with Publisher(store, model, dtype=None, encoding=encoding) as publisher:
        publisher.publish_patch(0).result()
        held: State = {}
        follower = Replica(store, held)
        follower.update()
        for tensor in model.values():
            bits(tensor)[::7] += 1
        for module, name in ((delta_module, "encode_all"), (entries, "decode_all"), (elements, "sum_each")):
            count(module, name)
        publisher.publish_patch(1).result()
        follower.update()
    assert_same_bits(held, model)
    # A few for each dtype; by themselves, 400 tensors would take 400 and more.
    assert max(calls.values()) <= 20
    assert calls["sum_each"] > 0
    assert (calls["encode_all"] > 0) == (calls["decode_all"] > 0) == (encoding == "context")


@pytest.mark.parametrize("source", ["raw", "gap", "context"])
@pytest.mark.parametrize("target", ["raw", "gap", "context"])
def test_a_delta_is_written_as_a_publisher_with_that_encoding_would(
    tmp_path: Path, source: str, target: str
) -> None:
    stores = {}
    for encoding in (source, target):
        torch.manual_seed(1)
        stores[encoding] = run = Run(MemoryStore())
        run.open(encoding=encoding, anchor_every=100)
        run.publish_versions(3)
        run.close()
    found, num_bytes = transcode(stores[source].store, 2, encoding=target, out=tmp_path / "delta")
    wanted = history.read_manifest(stores[target].store, 2)
    assert found.state.total == wanted.state.total
    assert wanted.delta is not None
    (stored,) = wanted.delta.payloads
    _, mine = open_buffer("mine", bytearray((tmp_path / "delta").read_bytes()))
    _, theirs = open_buffer("theirs", bytearray(b"".join(stores[target].store.read(stored.key))))
    assert_same_bits(mine, theirs)
    assert num_bytes == (tmp_path / "delta").stat().st_size


def test_a_tensor_whose_patch_changes_nothing_is_left_out(tmp_path: Path) -> None:
    objects = surgery.load(Path(__file__).parent.parent / "golden" / "v1-gap")
    store = surgery.store_of(objects)
    _, stated = surgery.entries(surgery.payload(objects, 1, "delta"))
    before: State = {}
    Replica(store, before).update(0)
    name = next(
        n for n, t in before.items() if f"{n}.idx" not in stated and t.dtype == torch.bfloat16 and t.numel()
    )
    spec = spec_of(name, before[name])
    value = bytes(raw_bytes(before[name].view(-1)[:1]))
    same = {f"{name}.idx": ("U16", [1], bytes(2)), f"{name}.val": (spec.dtype, [1], value)}
    bucket_edits.second_payload(same, {name: {"dtype": spec.dtype, "shape": list(spec.shape)}})(objects)
    transcode(surgery.store_of(objects), 1, encoding="raw", out=tmp_path / "delta")
    _, tensors = open_buffer("", bytearray((tmp_path / "delta").read_bytes()))
    assert tensors.keys() == stated.keys()


def test_what_cannot_be_transcoded_says_why(run: Run, tmp_path: Path) -> None:
    run.publish_versions(2)
    with pytest.raises(UsageError, match="no delta"):
        transcode(run.store, 0, encoding="gap", out=tmp_path / "delta")
    with pytest.raises(UsageError, match="encoding must be"):
        transcode(run.store, 1, encoding="auto", out=tmp_path / "delta")
    (tmp_path / "there").touch()
    with pytest.raises(UsageError, match="exists"):
        transcode(run.store, 1, encoding="gap", out=tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_no_manifest_may_say_auto() -> None:
    with pytest.raises(UnsupportedFormat):
        encoding_named("auto")
