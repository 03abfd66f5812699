"""What a publisher puts into a store, and when."""

import threading
from typing import Any

import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.codec.tensor_file import open_buffer
from patchstore.errors import PublishFailed, UsageError
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import before
from tests.support.weights import Run, assert_same_bits, newest, served


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


@pytest.mark.parametrize("resume", [True, "anchor"])
def test_the_version_by_which_a_run_is_resumed_stands_for_weights_that_it_has(run: Run, resume: Any) -> None:
    run.open()
    run.publish(3)
    run.close()
    resumed = run.open(resume=resume)
    found = resumed.publish_patch(4, if_changed=True)
    # With "anchor" nobody has looked which weights the version has.
    assert (found.result().version, found.is_unchanged) == ((1, True) if resume is True else (2, False))
    assert (resumed.version, resumed.step) == ((1, 3) if resume is True else (2, 4))
    run.train()
    assert resumed.publish_patch(5, if_changed=True).result().step == 5
    assert_same_bits(newest(run.store), served(run.model))


def test_a_step_is_published_once(run: Run) -> None:
    def once(publisher: Publisher, step: int) -> tuple[int, bool]:
        found = publisher.publish_once(step)
        return found.result().version, found.is_unchanged

    publisher = run.open()
    assert [once(publisher, step) for step in (0, 0, 1)] == [(0, False), (0, True), (1, False)]
    run.train()
    assert [once(publisher, 1) for _ in range(2)] == [(2, False), (2, True)]
    run.close()
    # By version 3 it is resumed.
    resumed = run.open(resume="auto")
    assert [once(resumed, step) for step in (1, 2)] == [(3, True), (4, False)]
    run.close()
    resumed = run.open(resume="auto")
    run.train()
    assert once(resumed, 3) == (6, False)
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


def test_unchanged_tensors_are_absent_from_a_delta(run: Run) -> None:
    run.open(encoding="gap")
    run.publish()
    run.model["scale"].fill_(0.25)
    manifest = run.publish()
    assert manifest.delta is not None
    _, tensors = open_buffer("", bytearray(run.store.get(manifest.delta.payloads[0].key)))
    assert tensors.keys() == {"scale.idx", "scale.val"}


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


def test_a_hint_that_cannot_be_written_does_not_unmake_versions(store: MemoryStore) -> None:
    def refuse() -> None:
        raise UsageError("this bucket admits new objects only")

    run = Run(before(store, "put", "head.json", refuse))
    assert [manifest.kind for manifest in run.publish_versions(3)] == ["anchor", "delta", "delta"]
    run.close()
    assert history.head(store) is not None


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
