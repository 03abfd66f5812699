"""Bad buckets are refused by every reader, and leave nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchstore.apply.replica import Replica
from patchstore.bucket import history
from patchstore.errors import CorruptObject, PatchstoreError
from patchstore.read import replay
from patchstore.read.anchors import open_anchor
from patchstore.read.host_cache import HostCache
from patchstore.stores import layout
from tests.format import bad_buckets, bad_records, bucket_edits, independent_reader, surgery
from tests.format.golden_buckets import GOLDEN, PatientStore, assert_expected, spoiled
from tests.support.copies import put_back
from tests.support.weights import assert_same_bits


@pytest.fixture(params=bad_buckets.CASES, ids=lambda case: case.name.encode("unicode_escape").decode())
def case(request: pytest.FixtureRequest) -> bucket_edits.Bad:
    return request.param  # type: ignore[no-any-return]


def test_a_bad_bucket_is_refused_by_replay_and_leaves_no_file(tmp_path: Path, case: bucket_edits.Bad) -> None:
    if case.only_verified:
        pytest.skip("a replay needs nothing above its anchor")
    store = PatientStore(spoiled(case))
    with pytest.raises(PatchstoreError) as caught:
        replay.replay(store, case.version, out=tmp_path / "out")
    assert caught.value.kind in case.kinds
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(100)
def test_a_bad_bucket_is_refused_by_verify_and_by_a_new_follower(
    case: bucket_edits.Bad,
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    readers: list[Callable[[PatientStore], object]] = [lambda store: replay.verify(store, case.version)]
    if not (case.beyond_followers or case.only_verified):
        # A follower reads no config, and nothing above an anchor.
        readers.append(lambda store: Replica(store, tensors).update(case.version))
    for read in readers:
        with pytest.raises(PatchstoreError) as caught:
            read(PatientStore(spoiled(case)))
        assert caught.value.kind in case.kinds
    assert tensors == {}


@pytest.mark.sample(100)
def test_a_bad_bucket_does_not_move_a_follower_that_holds_the_version_before(case: bucket_edits.Bad) -> None:
    good = surgery.load(GOLDEN / case.bucket)
    store = PatientStore(good)
    follower = Replica(store, {})
    if case.version > 0 and layout.manifest_key(case.version - 1) in good:
        follower.update(case.version - 1)
    before = {name: tensor.clone() for name, tensor in follower.tensors.items()}
    held = follower.held
    put_back(store, spoiled(case))
    try:
        follower.update(case.version)
    except PatchstoreError:
        assert follower.held == held
        assert_same_bits(dict(follower.tensors), before)
    else:
        # It needed nothing of what is wrong, so it must have the right weights.
        assert_expected(follower, case.bucket, case.version)


@pytest.mark.sample(100)
def test_a_bad_bucket_is_refused_by_the_independent_reader(tmp_path: Path, case: bucket_edits.Bad) -> None:
    bucket = surgery.lay_out(spoiled(case), tmp_path)
    with pytest.raises(independent_reader.Refused):
        independent_reader.verify(bucket, case.version)
    if not case.only_verified:
        with pytest.raises(independent_reader.Refused):
            independent_reader.rebuild(bucket, case.version)


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in bad_records.BAD_SUMS])
def test_bad_digest_sums_are_refused_where_they_are_read(tmp_path: Path, change: Any) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    change(objects)
    with pytest.raises(CorruptObject):
        replay.verify(PatientStore(objects), 1)
    with pytest.raises(independent_reader.Refused):
        independent_reader.rebuild(surgery.lay_out(objects, tmp_path), 1)
    # The total proves the weights without them.
    follower = Replica(PatientStore(objects), {})
    follower.update(1)
    assert_expected(follower, "v1-gap", 1)


def test_a_tensor_coded_in_two_payloads_is_refused_though_they_agree() -> None:
    objects = surgery.load(GOLDEN / "v1-context")
    _, tensors = surgery.entries(surgery.payload(objects, 1, "delta"))
    coded = {name: tensors[name] for name in ("table", "tiles")}
    bucket_edits.second_payload(coded, {})(objects)
    with pytest.raises(CorruptObject):
        replay.verify(surgery.store_of(objects), 1)
    with pytest.raises(CorruptObject):
        Replica(surgery.store_of(objects), {}).update(1)


@pytest.mark.parametrize(
    "name", ["a change is stated in two payloads", "an element of BOOL becomes 2 in v1-gap"]
)
def test_a_follower_on_its_way_from_the_version_before_refuses_what_others_refuse(name: str) -> None:
    """Not as a wrong state, which would send it back to an anchor."""
    case = next(case for case in bad_buckets.CASES if case.name == name)
    store = surgery.store_of(surgery.load(GOLDEN / case.bucket))
    follower = Replica(store, {})
    follower.update(0)
    put_back(store, spoiled(case))
    with pytest.raises(CorruptObject):
        follower.stage(1)
    with pytest.raises(CorruptObject):
        follower.update(1)


def test_an_element_of_bool_is_checked_in_an_anchor_that_is_mapped(tmp_path: Path) -> None:
    case = next(case for case in bad_buckets.CASES if case.name == "anchor has an element of BOOL that is 2")
    store = surgery.store_of(spoiled(case))
    header, found = history.run_header(store), history.read_manifest(store, 0)
    cache = HostCache(tmp_path / "cache")
    with pytest.raises(CorruptObject), open_anchor(store, found, header.schema.by_name(), cache):
        pass
