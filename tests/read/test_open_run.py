"""`patchstore.open`: a run's versions as a list, their weights in memory, and what differs between two."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import patchstore
from patchstore import Publisher, Version
from patchstore.bucket import kept, shortcuts
from patchstore.bucket.records import Ends
from patchstore.errors import (
    CorruptObject,
    PatchstoreError,
    SchemaMismatch,
    StateMismatch,
    Unsigned,
    UsageError,
    VersionNotFound,
    VersionRetired,
)
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, retire
from patchstore.signing import KeySigner
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.signing.signed_runs import sign
from tests.support.keys import key_pair
from tests.support.pages import code_of
from tests.support.small_models import causal, compiled, layers
from tests.support.weights import Run, assert_same_bits, lie


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_and_close(6)
    return run


def zeros(run: Run) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in run.history[0].items()}


def test_the_code_of_the_page_runs_as_it_stands(run: Run, tmp_path: Path) -> None:
    kept.tag(run.store, "best", 2)
    run.open(resume="anchor")
    run.publish_versions(6)
    run.close()
    (code,) = code_of("docs/history.md", "Look")
    names = {"model": zeros(run)}
    exec(code.replace("s3://bucket/my-run", str(tmp_path / "bucket")), names)
    assert_same_bits(names["model"], run.history[12])
    assert_same_bits(names["tensors"], run.history[2])  # type: ignore[arg-type]


# Versions.


def test_versions_are_listed_oldest_first_with_what_is_known_of_them(run: Run, tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    kept.tag(run.store, "best", 2)
    kept.tag(run.store, "last", 2)
    sign(run.store, KeySigner(private), 3)
    # Of a writer that lost the version: another manifest.
    lost = next((tmp_path / "bucket" / "signatures").iterdir())
    digits = lost.name.split("-")[1]
    lost.with_name(lost.name.replace("00000003", "00000001").replace(digits, "0" * 32)).write_bytes(b"")
    with patchstore.open(tmp_path / "bucket") as found:
        versions = found.versions()
    assert [each.number for each in versions] == [*range(6)]
    assert [each.step for each in versions] == [*range(6)]
    assert versions[0].share_changed is None
    assert 0 < (versions[1].share_changed or 0) < 0.1
    assert [each.tags for each in versions] == [(), (), ("best", "last"), (), (), ()]
    name = KeySigner(private).public_key.name
    assert [each.signed_by for each in versions] == [(), (), (), (name,), (), ()]
    assert [each.has_anchor for each in versions] == [True, False, False, False, True, False]
    assert not any(each.is_resumed or each.is_retired for each in versions)
    assert versions[0].num_bytes > versions[1].num_bytes > 0
    assert versions[0].time <= versions[5].time


def test_only_the_newest_are_listed_if_that_is_asked_for(run: Run) -> None:
    found = patchstore.open(run.store)
    assert [each.number for each in found.versions(last=2)] == [4, 5]
    assert found.versions(last=100) == found.versions()
    assert found.latest.number == 5
    for wrong in (0, -1, 1.5, "two", True):
        with pytest.raises(UsageError, match="last"):
            found.versions(last=wrong)  # type: ignore[arg-type]


def test_a_version_says_that_a_publisher_resumed_or_went_back_there(run: Run) -> None:
    run.go_back(2)
    run.open(resume=2)
    run.train_versions(1)
    run.close()
    run.open(resume=True)
    run.close()
    versions = patchstore.open(run.store).versions()
    assert [each.number for each in versions if each.is_resumed] == [6, 8]
    assert versions[6].manifest.parent == 2
    # Also if it is the first that is read.
    assert patchstore.open(run.store).versions(last=1)[0].is_resumed


def test_retired_versions_and_added_anchors_are_marked(run: Run) -> None:
    assert [*Compactor(run.store, anchor_every=2).compact()]
    retire(run.store, Retention(keep_last=1), dry_run=False)
    found = patchstore.open(run.store)
    retired = [each.number for each in found.versions() if each.is_retired]
    assert 1 in retired
    assert 5 not in retired
    assert {each.number for each in found.versions() if each.has_anchor} == {0, 2, 4}
    with pytest.raises(VersionRetired):
        found.load(1)
    with pytest.raises(VersionRetired):
        found.diff(1, 5)


def test_who_may_not_list_the_store_sees_the_versions_without_their_marks(run: Run) -> None:
    def refuse(verb: str, _: str) -> None:
        if verb == "list":
            raise UsageError("listing is not allowed")

    found = patchstore.open(FaultyStore(run.store, before=refuse))
    versions = found.versions()
    assert [each.number for each in versions] == [*range(6)]
    assert {(each.tags, each.signed_by, each.is_retired) for each in versions} == {(None, None, None)}
    assert [each.has_anchor for each in versions] == [True, None, None, None, True, None]
    assert_same_bits(found.load(3), run.history[3])


def test_the_newest_version_costs_five_reads_and_its_marks_are_listed_when_asked_for(
    run: Run,
) -> None:
    watched = FaultyStore(run.store)
    found = patchstore.open(watched)
    watched.calls.clear()
    newest = found.latest
    assert (newest.number, newest.share_changed) == (5, found.versions(last=1)[0].share_changed)
    del watched.calls[5:]
    head, *slots = (f"versions/{version:08}.json" for version in (5, 6, 4, 5))
    assert sorted(watched.calls) == sorted(("get", key) for key in ("head.json", head, *slots))
    watched.calls.clear()
    assert newest.tags == newest.tags == ()
    assert sum(verb == "list" for verb, _ in watched.calls) == 4


def test_a_version_that_cannot_be_read_is_an_error_with_its_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bucket" / "versions" / "00000002.json").write_text("{")
    found = patchstore.open(run.store)
    assert found.latest.number == 5
    assert len(found.versions(last=3)) == 3
    with pytest.raises(CorruptObject, match=r"00000002\.json"):
        found.versions()


def test_a_place_without_a_run_and_a_run_without_versions_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(VersionNotFound, match="holds no run"):
        patchstore.open(MemoryStore())
    with pytest.raises(VersionNotFound, match="no folder"):
        patchstore.open(tmp_path / "nothing")
    with pytest.raises(UsageError, match="a store is given by its URL"):
        patchstore.open(12)  # type: ignore[arg-type]
    store = MemoryStore()
    with Publisher(store, {"w": torch.zeros(4)}):
        empty = patchstore.open(store)
        assert empty.versions() == []
        for what in (lambda: empty.latest, empty.load):
            with pytest.raises(VersionNotFound, match="no version yet; publish one"):
                what()


def test_a_run_says_what_it_is(run: Run, tmp_path: Path) -> None:
    found = patchstore.open(run.store)
    assert repr(found).startswith(f"<Run {found.header.run_id} in {tmp_path}/bucket: 6 tensors, ")
    assert "manifest" not in repr(found.latest)
    assert repr(found.diff(1, 3)).startswith("<Diff of versions 1 and 3: ")
    assert len(repr(found.diff(1, 3))) < 100


@pytest.mark.parametrize(
    ("version", "error", "says"),
    [
        ("3", UsageError, "a version is an integer, not a text"),
        ("latest", VersionNotFound, "the newest version needs no name"),
    ],
)
def test_a_version_by_a_wrong_name_is_a_sentence(
    run: Run, version: str, error: type[PatchstoreError], says: str
) -> None:
    with pytest.raises(error, match=says):
        patchstore.open(run.store).load(version)


# Weights.


@pytest.mark.parametrize("version", [0, 3, 4, 5, None, "best"])
def test_a_version_is_loaded_bit_for_bit(run: Run, version: int | str | None) -> None:
    kept.tag(run.store, "best", 2)
    told: list[tuple[int, int]] = []
    found = patchstore.open(run.store)
    tensors = found.load(version, progress=lambda done, total: told.append((done, total)))
    assert_same_bits(tensors, run.history[{None: 5, "best": 2}.get(version, version)])  # type: ignore[index]
    assert told[-1] == (found.schema.num_bytes, found.schema.num_bytes)


def test_a_version_is_loaded_into_a_dict_in_place(run: Run) -> None:
    into = zeros(run)
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    found = patchstore.open(run.store)
    for version in (5, 1):
        given = found.load(version, into=into)
        assert_same_bits(into, run.history[version])
        assert given.keys() == into.keys()
        assert all(given[name] is into[name] for name in into)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == places


def test_a_version_is_loaded_into_a_model_in_place_under_the_names_that_it_was_published_with() -> None:
    store = MemoryStore()
    trained = causal("Llama", tie_word_embeddings=True)
    with Publisher(store, trained) as publisher:
        publisher.publish_patch(0).result()
    assert patchstore.open(store).schema.tied
    for model in (
        causal("Llama", tie_word_embeddings=True),
        compiled(causal("Llama", tie_word_embeddings=True)),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        places = [each.data_ptr() for each in model.parameters()]
        patchstore.open(store).load(0, into=model)
        for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert [each.data_ptr() for each in model.parameters()] == places


def test_inference_mode_and_gradients_are_no_obstacle(run: Run) -> None:
    found = patchstore.open(run.store)
    with torch.inference_mode():
        into = zeros(run)
        made = found.load(2)
        found.load(3, into=into)
        assert_same_bits(into, run.history[3])
    made["scale"].add_(1)
    model = layers().to(torch.bfloat16)
    store = MemoryStore()
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
    patchstore.open(store).load(into=model)
    assert all(each.requires_grad for each in model.parameters())


def _without(into: dict[str, torch.Tensor]) -> object:
    del into["scale"]
    return into


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], type[PatchstoreError], str]] = {
    "missing": (_without, SchemaMismatch, "'scale' is missing, but in the run it is BF16"),
    "empty": (lambda _: {}, SchemaMismatch, "is missing"),
    "more": (lambda into: into | {"other": torch.zeros(1)}, SchemaMismatch, "'other' is F32 .*missing"),
    "shape": (lambda into: into | {"scale": torch.zeros(1).bfloat16()}, SchemaMismatch, r"is BF16 \[1\]"),
    "dtype": (lambda into: into | {"scale": torch.tensor(0.0)}, SchemaMismatch, r"is F32 \[\], but"),
    "strides": (
        lambda into: into | {"embed.weight": torch.zeros(33, 97).bfloat16().T},
        SchemaMismatch,
        "not contiguous",
    ),
    "meta": (
        lambda into: into | {"scale": torch.empty((), device="meta", dtype=torch.bfloat16)},
        SchemaMismatch,
        "meta device",
    ),
    "number": (lambda into: into | {1: into["scale"]}, SchemaMismatch, "must be strings, but one is 1"),
    "shared": (
        lambda into: (
            into | {"layers.0.norm.weight": (memory := torch.zeros(40).bfloat16())[:33], "scale": memory[3]}
        ),
        SchemaMismatch,
        "share memory",
    ),
    "text": (lambda into: into | {"scale": "0.5"}, UsageError, "'scale' is a str"),
    "list": (lambda into: [*into.values()], UsageError, "not list"),
    "path": (lambda _: "weights", UsageError, "not str"),
    "model": (lambda _: layers(), SchemaMismatch, "missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_as_the_run_is_refused_with_a_sentence_and_stays_as_it_was(run: Run, case: str) -> None:
    change, error, says = WRONG[case]
    into = change(zeros(run))
    with pytest.raises(error, match=says):
        patchstore.open(run.store).load(3, into=into)  # type: ignore[arg-type]
    if isinstance(into, dict):
        left = [each for each in into.values() if isinstance(each, torch.Tensor) and not each.is_meta]
        assert not any(each.any() for each in left)


def test_a_view_that_negates_is_refused() -> None:
    store = MemoryStore()
    with Publisher(store, {"weight": torch.ones(1)}, dtype=None) as publisher:
        publisher.publish_patch(0).result()
    view = torch.zeros(1, dtype=torch.complex64).conj().imag
    assert view.is_neg() and view.is_contiguous()
    with pytest.raises(SchemaMismatch, match="negated"):
        patchstore.open(store).load(into={"weight": view})


def test_a_model_whose_tensors_are_computed_is_refused(run: Run) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(causal("Llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    store = MemoryStore()
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(UsageError, match="cannot be written in place"):
        patchstore.open(store).load(into=model)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_wrong_weights_in_the_bucket_leave_what_was_there(run: Run) -> None:
    lie(run.store, 5, "layers.0.proj.weight")
    into = zeros(run)
    found = patchstore.open(run.store)
    with pytest.raises(StateMismatch):
        found.load(5, into=into)
    assert not any(each.any() for each in into.values())
    with pytest.raises(StateMismatch):
        found.diff(4, 5)
    for wrong, error in (
        (9, VersionNotFound),
        ("none", VersionNotFound),
        (-1, UsageError),
        (1.5, UsageError),
    ):
        with pytest.raises(error):
            found.load(wrong, into=into)  # type: ignore[arg-type]


def test_a_required_key_must_have_signed_what_is_loaded(run: Run, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    sign(run.store, KeySigner(private), 3)
    found = patchstore.open(run.store, required_keys=public)
    assert_same_bits(found.load(3), run.history[3])
    for call in (lambda: found.load(4), lambda: found.diff(3, 4)):
        with pytest.raises(Unsigned):
            call()


# Differences.


def test_two_versions_are_compared_bit_by_bit_and_tensor_by_tensor(run: Run) -> None:
    found = patchstore.open(run.store)
    for before, after in ((0, 1), (1, 0), (3, 5), (2, 2)):
        compared = found.diff(before, after)
        expected = {}
        for name, old in run.history[before].items():
            new = run.history[after][name]
            changed = old.view(torch.int16 if old.dtype == torch.bfloat16 else old.dtype) != new.view(
                torch.int16 if new.dtype == torch.bfloat16 else new.dtype
            )
            if changed.any():
                largest = (new.double() - old.double()).abs().max().item()
                expected[name] = (int(changed.sum()), old.numel(), largest)
        assert {
            each.name: (each.num_changed, each.num_elements, each.largest_change) for each in compared.tensors
        } == expected
        assert compared.num_changed == sum(each[0] for each in expected.values())
        assert (compared.before.version, compared.after.version) == (before, after)
        assert compared.num_tensors == 6
    step = found.diff(4, 5)
    (version,) = found.versions(last=1)
    assert step.share_changed == version.share_changed


def test_numbers_that_are_none_count_as_an_infinite_change_and_signs_of_zero_as_none() -> None:
    store = MemoryStore()
    model = {
        "nan": torch.zeros(4).bfloat16(),
        "sign": torch.zeros(4).bfloat16(),
        "code": torch.zeros(2).int(),
    }
    model["wide"] = torch.zeros(3, dtype=torch.uint16)
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model["nan"][1] = math.nan
        model["sign"][2] = -0.0
        model["code"][0] = -3
        model["wide"][1] = 65535
        publisher.publish_patch(1).result()
    found = {
        each.name: (each.num_changed, each.largest_change)
        for each in patchstore.open(store).diff(0, 1).tensors
    }
    assert found == {"nan": (1, math.inf), "sign": (1, 0.0), "code": (1, 3.0), "wide": (1, 65535.0)}


def test_both_codes_of_a_byte_of_f4_are_compared() -> None:
    store = MemoryStore()
    codes = torch.arange(16, dtype=torch.uint8) * 17
    model = {"codes": codes.view(torch.float4_e2m1fn_x2)}
    with Publisher(store, model, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        # -6 becomes 6, and 1 becomes 1.5.
        codes[15], codes[2] = 0xF7, 0x23
        publisher.publish_patch(1).result()
    run = patchstore.open(store)
    (found,) = run.diff(0, 1).tensors
    assert (found.num_changed, found.num_elements, found.largest_change) == (2, 16, 12.0)
    into = {"codes": torch.zeros_like(codes).view(torch.float4_e2m1fn_x2)}
    run.load(1, into=into)
    assert_same_bits(into, model)


def damage(run: Run, version: int) -> None:
    """Damage the anchor that was added to a version."""
    key = shortcuts.read(run.store, Ends(version, None)).payloads[0].key
    run.store.put(key, run.store.get(key)[:-1] + b"\xff")


def test_a_damaged_anchor_of_one_version_changes_nothing_of_the_way_to_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(MemoryStore())
    run.publish_and_close(20, anchor_every=None)
    assert [*Compactor(run.store, anchor_every=8).compact()]
    found = patchstore.open(run.store)
    expected = found.diff(9, 19)
    damage(run, 8)
    assert (found.diff(9, 19).tensors, len(caplog.messages)) == (expected.tensors, 1)
    assert found.diff(19, 9).num_changed == expected.num_changed
    assert len(caplog.messages) == 2
    for said in caplog.messages:
        assert "version 9 is reached in another way" in said and "00000008-anchor.json" in said


def test_versions_whose_anchors_have_tensors_in_another_order_are_compared(tmp_path: Path) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.open(max_shard_bytes=5000)
    run.publish()
    run.train_versions(1)
    run.close()
    run.open(resume=True, anchor_every=1, max_shard_bytes=50_000)
    run.train_versions(2)
    run.close()
    found = patchstore.open(run.store)
    expected = {
        name
        for name, old in run.history[1].items()
        if not torch.equal(old, run.history[found.latest.number][name])
    }
    assert {each.name for each in found.diff(1, found.latest.number).tensors} == expected


# The publisher.


def test_a_publisher_says_where_it_is(tmp_path: Path) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    publisher = run.open()
    assert (publisher.version, publisher.step) == (None, None)
    assert repr(publisher).endswith("/bucket: no version yet>")
    run.publish(7)
    assert (publisher.version, publisher.step) == (0, 7)
    publication = publisher.publish_patch(7, if_changed=True)
    publication.result()
    assert repr(publication) == "<Publication of step 7: version 0, which nothing had changed>"
    assert "version 0 (step 7)>" in repr(publisher)
    run.close()
    assert repr(publisher).endswith("version 0 (step 7), closed>")
    resumed = run.open(resume=True)
    assert (resumed.version, resumed.step) == (1, 7)
    assert isinstance(patchstore.open(run.store).latest, Version)
    run.publish(8)
    assert (resumed.version, resumed.step) == (2, 8)
    run.close()


def test_errors_are_there_without_an_import_of_their_own() -> None:
    with pytest.raises(patchstore.errors.VersionNotFound):
        patchstore.open(MemoryStore())
