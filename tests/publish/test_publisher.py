"""What a publisher puts into a store, and when."""

import threading

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import PublishFailed, SchemaMismatch, UsageError
from patchstore.format import history
from patchstore.payloads.tensor_file import open_buffer
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits, newest, served


def test_the_first_version_is_an_anchor_and_the_next_ones_are_deltas(run: Run) -> None:
    kinds = [manifest.kind for manifest in run.publish_versions(6)]
    assert kinds == ["anchor", "delta", "delta", "delta", "anchor", "delta"]


def test_an_anchor_that_has_a_parent_keeps_its_delta(run: Run) -> None:
    anchor = run.publish_versions(5)[4]
    assert anchor.anchor is not None
    assert anchor.delta is not None and anchor.delta.num_changed > 0


def test_a_delta_holds_exactly_the_elements_whose_bf16_bits_changed(run: Run) -> None:
    before = run.publish()
    old = run.history[before.version]
    run.train()
    after = run.publish()
    new = run.history[after.version]
    changed = sum(int((old[n].view(-1) != new[n].view(-1)).sum()) for n in old)
    assert after.delta is not None
    assert after.delta.num_changed == changed > 0


def test_a_bool_with_another_byte_than_0_and_1_is_not_published(store: MemoryStore) -> None:
    mask = torch.tensor([True, False, True])
    with Publisher(store, {"mask": mask, "w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0).result()
        mask.view(torch.uint8)[1] = 2
        with pytest.raises(PublishFailed, match="mask"):
            publisher.publish_patch(1).result()
        mask.view(torch.uint8)[1] = 1
        publisher.publish_patch(2).result()
    assert newest(store)["mask"].view(torch.uint8).tolist() == [1, 1, 1]


def test_masters_that_moved_less_than_bf16_can_see_change_nothing(run: Run) -> None:
    run.publish()
    run.model["layers.0.norm.weight"] += 1e-6
    manifest = run.publish()
    assert manifest.delta is not None
    assert (manifest.delta.num_changed, manifest.delta.payloads) == (0, ())


def test_small_moves_add_up_until_bf16_sees_them(run: Run) -> None:
    run.publish()
    counts = []
    for step in range(40):
        run.model["layers.0.norm.weight"] += 2e-4
        delta = run.publish(step).delta
        counts.append(delta.num_changed if delta else 0)
    assert 0 < sum(counts) < 40 * 33
    assert_same_bits(newest(run.store), served(run.model))


def test_several_optimiser_steps_between_publications_are_all_in_the_next(run: Run) -> None:
    run.publish()
    for _ in range(5):
        run.train()
    run.publish()
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("anchor_every", [64, 1])
def test_what_is_published_only_if_it_changed_adds_no_version_where_it_did_not(
    run: Run, anchor_every: int
) -> None:
    publisher = run.open(anchor_every=anchor_every)
    first = publisher.publish_patch(0, if_changed=True)
    assert (first.result().version, first.is_unchanged) == (0, False)
    again = publisher.publish_patch(1, if_changed=True)
    assert (again.result(), again.is_unchanged) == (first.result(), True)
    run.train()
    assert publisher.publish_patch(2, if_changed=True).result().version == 1
    assert publisher.publish_patch(3).result().version == 2
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_every_third_version_is_an_anchor_also_if_only_changes_are_published(
    store: MemoryStore, every: int, waits: bool
) -> None:
    model = {"w": torch.zeros(1000)}
    with Publisher(store, model, anchor_every=3) as publisher:
        publications = []
        for step in range(10 * every):
            if step % every == 0:
                model["w"][step] += 1
            # Some calls find no change.
            publications.append(publisher.publish_patch(step, if_changed=True))
            if waits:
                publications[-1].result()
        results = [(each.result(), each.is_unchanged) for each in publications]
        manifests = [manifest for manifest, is_unchanged in results if not is_unchanged]
        assert [each.step for each in manifests] == [step * every for step in range(10)]
        assert [each.anchor is not None for each in manifests] == [i % 3 == 0 for i in range(10)]
        # Anchors of periods have their deltas too.
        assert all(each.delta is not None for each in manifests[1:])
    assert_same_bits(newest(store), served(model))


def test_calls_in_which_nothing_changed_bring_no_anchor_nearer(store: MemoryStore) -> None:
    model = {"w": torch.zeros(100)}
    with Publisher(store, model, anchor_every=3) as publisher:
        publisher.publish_patch(0)
        for step in range(1, 6):
            publisher.publish_patch(step, if_changed=True)
        model["w"][0] += 1
        assert publisher.publish_patch(6).result().kind == "delta"


def test_unchanged_tensors_are_absent_from_a_delta(run: Run) -> None:
    run.open(encoding="gap")
    run.publish()
    run.model["scale"].fill_(0.25)
    manifest = run.publish()
    assert manifest.delta is not None
    _, tensors = open_buffer("", bytearray(run.store.get(manifest.delta.payloads[0].key)))
    assert tensors.keys() == {"scale.idx", "scale.val"}


def test_nan_and_negative_zero_are_changes_and_arrive(run: Run) -> None:
    run.model["layers.0.norm.weight"].fill_(0.0)
    run.publish()
    run.model["layers.0.norm.weight"][3] = -0.0
    run.model["layers.0.norm.weight"][4] = float("nan")
    manifest = run.publish()
    assert manifest.delta is not None and manifest.delta.num_changed == 2
    assert_same_bits(newest(run.store), served(run.model))


def test_a_nan_that_stays_is_no_change(run: Run) -> None:
    run.model["layers.0.norm.weight"][4] = float("nan")
    run.publish()
    manifest = run.publish()
    assert manifest.delta is not None and manifest.delta.num_changed == 0


def test_a_tied_tensor_is_stored_and_changed_once(run: Run) -> None:
    run.publish()
    header = history.read_header(run.store)
    assert header is not None
    assert header.schema.tied == {"head.weight": "embed.weight"}
    assert "head.weight" not in header.schema.by_name()
    run.model["head.weight"][0, 0] = 9.0
    manifest = run.publish()
    assert manifest.delta is not None and manifest.delta.num_changed == 1
    assert newest(run.store)["embed.weight"][0, 0] == 9.0


def test_untying_a_tensor_is_refused(run: Run) -> None:
    run.publish()
    run.model["head.weight"] = run.model["head.weight"].clone()
    with pytest.raises(SchemaMismatch):
        run.publish()


def test_a_module_is_published_by_its_state_dict(store: MemoryStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model(torch.ones(8)).sum().backward()
        optimiser.step()
        publisher.publish_patch(1).result()
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert_same_bits(newest(store), expected)


def test_without_a_dtype_tensors_keep_their_own(store: MemoryStore) -> None:
    model = {
        "a": torch.randn(5),
        "b": torch.randn(5).to(torch.float16),
        "c": torch.randn(5).to(torch.float8_e4m3fn),
    }
    with Publisher(store, model, dtype=None) as publisher:
        publisher.publish_patch(0).result()
    assert_same_bits(newest(store), model)


@pytest.mark.parametrize("encoding", ["raw", "gap"])
def test_an_outlier_far_away_arrives_in_either_encoding(store: MemoryStore, encoding: str) -> None:
    model = {"w": torch.zeros(300_000)}
    with Publisher(store, model, encoding=encoding) as publisher:
        publisher.publish_patch(0).result()
        model["w"][7] = 1.0
        model["w"][299_999] = 2.0
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None and manifest.delta.num_changed == 2
    assert_same_bits(newest(store), served(model))


def test_an_unknown_encoding_is_refused(store: MemoryStore) -> None:
    with pytest.raises(UsageError, match="raw, gap, context, auto"):
        Publisher(store, {"w": torch.zeros(3)}, encoding="zip")


def test_what_is_not_a_whole_tensor_is_refused(store: MemoryStore) -> None:
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"w": torch.zeros(3, device="meta")})


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.pop("scale"),
        lambda model: model.update(extra=torch.zeros(3)),
        lambda model: model.update(scale=torch.zeros(2)),
        lambda model: model.update(position_ids=model["position_ids"].to(torch.int32)),
    ],
)
def test_a_source_whose_schema_changes_is_refused_until_it_is_back(run: Run, change) -> None:
    run.publish()
    good = dict(run.model)
    change(run.model)
    with pytest.raises(SchemaMismatch):
        run.publish()
    run.model.clear()
    run.model.update(good)
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


def test_a_hint_that_cannot_be_written_does_not_unmake_versions(store: MemoryStore) -> None:
    class NoOverwriting(MemoryStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key == "head.json":
                raise UsageError("this bucket admits new objects only")
            super().put(key, data, if_absent=if_absent)

    strict = NoOverwriting()
    run = Run(strict)
    kinds = [manifest.kind for manifest in run.publish_versions(3)]
    run.close()
    assert kinds == ["anchor", "delta", "delta"]
    assert history.head(strict) is not None


def test_the_caller_may_change_weights_as_soon_as_publish_returns(store: MemoryStore) -> None:
    slow = threading.Event()

    class Waiting(MemoryStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            slow.wait(30)
            super().upload(key, chunks)

    waiting = Waiting()
    model = {"w": torch.zeros(1000)}
    with Publisher(waiting, model) as publisher:
        first = publisher.publish_patch(0)
        model["w"].fill_(1.0)
        assert not first.done()
        slow.set()
        first.result()
        delta = publisher.publish_patch(1)
        model["w"].fill_(2.0)
        delta.result()
    assert_same_bits(newest(waiting), {"w": torch.ones(1000, dtype=torch.bfloat16)})


def test_no_more_publications_are_under_way_than_allowed() -> None:
    gate = threading.Event()
    started = threading.Semaphore(0)

    class Waiting(MemoryStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            started.release()
            gate.wait(30)
            super().upload(key, chunks)

    model = {"w": torch.zeros(10)}
    store = Waiting()
    gate.set()
    publisher = Publisher(store, model, max_pending=2)
    publisher.publish_patch(0).result()
    gate.clear()
    for step in (1, 2):
        model["w"] += 1
        publisher.publish_patch(step)
    third = threading.Thread(target=publisher.publish_patch, args=(3,))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.set()
    third.join(30)
    publisher.close()
    assert history.head(store) is not None and history.head(store).version == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("encoding", ["auto", "gap"])
@pytest.mark.parametrize("if_changed", [False, True])
def test_as_many_deltas_are_under_way_as_max_pending_says(
    store: MemoryStore, encoding: str, if_changed: bool
) -> None:
    gate = threading.Event()
    slow = Fault(verb="upload", key="deltas/*", effect="delay", times=None)
    model = {"w": torch.zeros(100)}
    with Publisher(
        FaultyStore(store, slow, sleep=lambda _: gate.wait(120)), model, max_pending=6, encoding=encoding
    ) as publisher:
        publisher.publish_patch(0).result()
        under_way = []

        def publish() -> None:
            for step in range(1, 8):
                model["w"] += 1
                under_way.append(publisher.publish_patch(step, if_changed=if_changed))
                if len(under_way) == 6:
                    six.set()

        six = threading.Event()
        calls = threading.Thread(target=publish)
        calls.start()
        try:
            assert six.wait(30)
            assert not any(each.done() for each in under_way)
            calls.join(0.2)
            assert calls.is_alive()
        finally:
            gate.set()
            calls.join(60)
        assert [each.result().kind for each in under_way] == ["delta"] * 7
    assert_same_bits(newest(store), served(model))


def test_a_manifest_is_as_small_for_thousands_of_tensors_as_for_one(store: MemoryStore) -> None:
    model = {f"experts.{i}.weight": torch.zeros(2) for i in range(5_000)}
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        for tensor in model.values():
            tensor.add_(1)
        manifest = publisher.publish_patch(1).result()
    assert manifest.state.sums.size == len(store.get(manifest.state.sums.key)) == 16 * 5_000
    assert max(len(store.get(key)) for key in store.list("versions/")) < 1_500


def test_a_version_with_its_parents_weights_names_its_parents_sums(run: Run) -> None:
    first = run.publish()
    second = run.publish()
    run.close()
    with Publisher(run.store, run.model, resume=True):
        claim = history.head(run.store)
    assert claim is not None
    assert first.state == second.state == claim.state
    assert [*run.store.list("states/")] == [first.state.sums.key]


def test_an_anchor_has_sums_of_its_own(run: Run) -> None:
    first = run.publish()
    with Publisher(run.store, run.model, resume="anchor") as publisher:
        second = publisher.publish_patch(1).result()
    assert first.state.total == second.state.total
    assert first.state.sums.key != second.state.sums.key
    assert run.store.get(first.state.sums.key) == run.store.get(second.state.sums.key)


def test_numbers_that_a_dtype_cannot_hold_are_refused(store: MemoryStore) -> None:
    model = {"ok": torch.tensor([float("inf"), 1.0]), "w": torch.tensor([1.0, 70_000.0])}
    with pytest.raises(
        SchemaMismatch, match=r"'w' has 1 numbers beyond the range of torch\.float16, such as 70000"
    ):
        Publisher(store, model, dtype="float16")
    assert list(store.list()) == []
    del model["w"]
    Publisher(store, model, dtype="fp16").close()


def test_a_source_that_never_changes_is_asked_about_once(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"w": torch.zeros(10)}
    with Publisher(store, model) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
        assert "no weight has changed" not in caplog.text
        for step in range(3, 9):
            publisher.publish_patch(step).result()
    assert caplog.text.count("no weight has changed in the last 3 publications") == 1


def test_a_closed_publisher_refuses_to_publish(run: Run) -> None:
    publisher = run.open()
    publisher.close()
    publisher.close()
    with pytest.raises(UsageError):
        publisher.publish_patch(0)


def test_tensors_that_share_an_address_are_tied_only_if_they_are_one(store: MemoryStore) -> None:
    memory = torch.randn(12)
    model = {
        "a": memory,
        "b": memory[:6],
        "c": memory.view(3, 4),
        "d": memory,
        "e": memory[:6],
        "none": memory[:0],
    }
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
    header = history.read_header(store)
    assert header is not None
    assert header.schema.tied == {"d": "a", "e": "b"}
    assert newest(store).keys() == {"a", "b", "c", "none"}
