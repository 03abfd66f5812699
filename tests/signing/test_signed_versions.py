"""Signed versions: made before the version exists, and required by readers before a weight is written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from signed_runs import forge, sign

from patchstore import Publisher, Replica, replay, verify
from patchstore.bucket import digests, history, manifest_json
from patchstore.errors import (
    PatchstoreError,
    PublishFailed,
    ResumeMismatch,
    Unsigned,
    UsageError,
    VersionConflict,
    WrongSignature,
)
from patchstore.ops.compact.service import Compactor
from patchstore.ops.replicate.replicator import Replicator
from patchstore.signing import KeySigner, PublicKey, RequiredKeys
from patchstore.stores import Store, layout, open_store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.commands import Cli
from tests.support.copies import objects_of, put_back
from tests.support.keys import key_pair
from tests.support.weights import Run, State, assert_same_bits, head

Pair = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A private key, and its public key."""
    return key_pair(tmp_path)


def model_signing(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the stock command line."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})


def signature_of(store: Store, version: int) -> str:
    (key,) = store.list(layout.signature_prefix(version))
    return key


def publish(run: Run, private: Path, count: int = 3) -> None:
    run.open(signer=KeySigner(private))
    run.publish_versions(count)


def edited(store: Store, version: int, **changes: object) -> None:
    """Replace a version's manifest by another one, as somebody does who may write to the bucket."""
    found = history.read_manifest(store, version)
    store.put(layout.manifest_key(version), manifest_json.to_json(replace(found, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "curve",
    [
        ec.SECP256R1(),
        pytest.param(ec.SECP384R1(), marks=pytest.mark.exhaustive),
        pytest.param(ec.SECP521R1(), marks=pytest.mark.exhaustive),
    ],
    ids=lambda each: each.name,
)
def test_the_stock_command_verifies_a_downloaded_version(
    run: Run, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    private, public = key_pair(tmp_path, curve=curve)
    publish(run, private)
    manifest, signature = tmp_path / "00000002.json", tmp_path / "00000002.sig"
    manifest.write_bytes(run.store.get(layout.manifest_key(2)))
    signature.write_bytes(run.store.get(signature_of(run.store, 2)))
    arguments = ("verify", "key", manifest, "--signature", signature, "--public_key", public)
    good = model_signing(*arguments)
    assert good.returncode == 0, good.stdout + good.stderr
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 2', b'"step": 3'))
    assert model_signing(*arguments).returncode != 0


def test_readers_that_require_the_key_get_every_version(run: Run, pair: Pair, tmp_path: Path) -> None:
    private, public = pair
    publish(run, private, 6)
    replica = Replica(run.store, {}, required_keys=public)
    for version in (2, 5, 0, 4):
        replica.update(version)
        assert_same_bits(dict(replica.tensors), run.history[version])
    assert verify(run.store, required_keys=[public]).version == 5
    assert replay(run.store, 3, out=tmp_path / "three", required_keys=str(public)).version == 3


def refusals(public: Path, tmp_path: Path) -> list[Callable[[Store, int], object]]:
    """Each way to read a version."""
    return [
        lambda store, version: Replica(store, {}, required_keys=public).update(version),
        lambda store, version: verify(store, version, required_keys=public),
        lambda store, version: replay(store, version, out=tmp_path / "out", required_keys=public),
    ]


def test_a_version_without_a_signature_is_refused_before_a_payload_is_read(
    run: Run, pair: Pair, tmp_path: Path
) -> None:
    run.publish_versions(2)
    watched = FaultyStore(run.store)
    for read in refusals(pair[1], tmp_path):
        with pytest.raises(Unsigned):
            read(watched, 1)
    assert not any(key.startswith(("anchors/", "deltas/", "states/")) for _, key in watched.calls)
    assert not (tmp_path / "out").exists()


def test_a_version_that_another_key_signed_is_refused(run: Run, pair: Pair, tmp_path: Path) -> None:
    publish(run, pair[0])
    other = key_pair(tmp_path, "other")[1]
    for read in refusals(other, tmp_path):
        with pytest.raises(Unsigned):
            read(run.store, 2)
    # One of several keys is enough.
    replica = Replica(run.store, {}, required_keys=[other, pair[1]])
    replica.update()
    assert replica.held == 2


def test_a_forged_version_is_refused_and_the_weights_stay(run: Run, pair: Pair) -> None:
    """Somebody who may write publishes weights of their own, without the key."""
    publish(run, pair[0])
    tensors: State = {}
    replica = Replica(run.store, tensors, required_keys=pair[1])
    replica.update()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    run.close()
    forged = forge(run.store)
    for version in (None, forged, forged - 1):
        with pytest.raises(Unsigned):
            replica.update(version)
    assert_same_bits(tensors, before)
    assert replica.held == 2


def test_each_change_of_a_signed_version_is_refused(run: Run, pair: Pair, tmp_path: Path) -> None:
    publish(run, pair[0])
    good = objects_of(run.store)
    signature = signature_of(run.store, 2)

    def moved_to_the_edited_manifest() -> None:
        edited(run.store, 2, step=77)
        data = run.store.get(layout.manifest_key(2))
        key = layout.signature_key(2, digests.digest(data), PublicKey.read(pair[1]).name)
        run.store.put(key, good[signature])

    def of_another_version() -> None:
        run.store.put(signature, good[signature_of(run.store, 1)])

    def replaced(old: bytes, new: bytes) -> Callable[[], None]:
        assert old in good[signature]
        return lambda: run.store.put(signature, good[signature].replace(old, new))

    def flipped() -> None:
        bundle = json.loads(good[signature])
        payload = bundle["dsseEnvelope"]["payload"]
        bundle["dsseEnvelope"]["payload"] = "A" + payload[1:]
        run.store.put(signature, json.dumps(bundle).encode())

    attacks: dict[Callable[[], object], type[Exception]] = {
        lambda: edited(run.store, 2, step=77): Unsigned,
        lambda: run.store.delete(signature): Unsigned,
        moved_to_the_edited_manifest: WrongSignature,
        of_another_version: WrongSignature,
        flipped: WrongSignature,
        replaced(b'"sig":"', b'"sig":"!'): WrongSignature,
        replaced(b"application/vnd.in-toto+json", b"text/plain"): WrongSignature,
        lambda: run.store.put(signature, b""): WrongSignature,
        lambda: run.store.put(signature, b"{}"): WrongSignature,
        lambda: run.store.put(signature, b'{"dsseEnvelope": []}'): WrongSignature,
        lambda: run.store.put(signature, b"[" * 2_000_000): WrongSignature,
    }
    for attack, kind in attacks.items():
        attack()
        for read in refusals(pair[1], tmp_path):
            with pytest.raises(kind):
                read(run.store, 2)
        put_back(run.store, good)
    Replica(run.store, {}, required_keys=pair[1]).update(2)


def test_another_header_beside_signed_versions_is_refused(run: Run, pair: Pair) -> None:
    """The state digest does not cover which tensors are tied."""
    publish(run, pair[0])
    header = history.read_header(run.store)
    assert header is not None
    tied = {**header.schema.tied, "lm_head.weight": "embed.weight"}
    changed = replace(header, schema=replace(header.schema, tied=tied))
    run.store.put(layout.HEADER, manifest_json.header_to_json(changed))
    Replica(run.store, {}).update(2)
    with pytest.raises(WrongSignature):
        Replica(run.store, {}, required_keys=pair[1]).update(2)


def test_fields_of_a_later_release_in_the_header_change_nothing(run: Run, pair: Pair) -> None:
    publish(run, pair[0])
    header = json.loads(run.store.get(layout.HEADER))
    run.store.put(layout.HEADER, json.dumps({**header, "later": 1}).encode())
    Replica(run.store, {}, required_keys=pair[1]).update(2)


def test_the_chain_covers_unsigned_ancestors(run: Run, pair: Pair) -> None:
    run.open(anchor_every=64)
    run.publish_versions(4)
    last = 3
    sign(run.store, KeySigner(pair[0]), last)
    replica = Replica(run.store, {}, required_keys=pair[1])
    replica.update(last)
    assert_same_bits(dict(replica.tensors), run.history[last])
    with pytest.raises(Unsigned):
        replica.update(1)
    edited(run.store, 2, step=5)
    with pytest.raises(Exception, match="names as its parent"):
        Replica(run.store, {}, required_keys=pair[1]).update(last)


def test_shortcuts_which_no_signature_covers_are_not_used(run: Run, pair: Pair) -> None:
    run.open(signer=KeySigner(pair[0]), anchor_every=1000)
    run.publish_versions(40)
    for _ in Compactor(run.store, anchor_every=16).compact():
        pass
    keys: dict[bool, list[str]] = {}
    for is_required in (False, True):
        watched = FaultyStore(run.store)
        replica = Replica(watched, {}, required_keys=pair[1] if is_required else None)
        replica.update(39)
        assert_same_bits(dict(replica.tensors), run.history[39])
        keys[is_required] = [key for _, key in watched.calls if key.startswith(layout.SHORTCUTS)]
    assert keys[False] and not keys[True]


def test_a_held_version_must_be_signed_too(run: Run, pair: Pair) -> None:
    run.publish_versions(2)
    with pytest.raises(Unsigned):
        Replica(run.store, dict(run.history[1]), held=1, required_keys=pair[1])


def test_a_version_costs_one_request_more(run: Run, pair: Pair) -> None:
    publish(run, pair[0], 4)

    def reads(**options: object) -> list[str]:
        watched = FaultyStore(run.store)
        replica = Replica(watched, {}, **options)  # type: ignore[arg-type]
        for version in (0, 1, 2, 3):
            replica.update(version)
        return sorted(key for verb, key in watched.calls if verb == "get")

    plain = reads()
    signed = reads(required_keys=pair[1])
    assert [key for key in signed if not key.startswith("signatures/")] == plain
    assert len(signed) == len(plain) + 4


# The writer.


def test_the_signature_is_stored_before_the_manifest(run: Run, pair: Pair) -> None:
    watched = FaultyStore(run.store)
    run.store = watched
    publish(run, pair[0])
    written = [key for verb, key in watched.calls if verb == "put"]
    for version in range(3):
        manifest = written.index(layout.manifest_key(version))
        assert written[manifest - 1].startswith(layout.signature_prefix(version))


@pytest.mark.parametrize("effect", ["fail-before", "fail-after", "exists"])
def test_a_lost_answer_about_a_signature_loses_nothing(pair: Pair, effect: str) -> None:
    store = MemoryStore()
    run = Run(FaultyStore(store, Fault(verb="put", key="signatures/*", effect=effect, skip=1)))  # type: ignore[arg-type]
    publish(run, pair[0])
    run.close()
    for version in range(3):
        Replica(store, {}, required_keys=pair[1]).update(version)
        signature_of(store, version)


def test_a_version_whose_signature_cannot_be_stored_does_not_exist(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.stores.tries.FIRST_PAUSE_S", 0.001)
    store = MemoryStore()
    fault = Fault(verb="put", key="signatures/00000001-*", effect="fail-before", times=5)
    run = Run(FaultyStore(store, fault))
    run.open(signer=KeySigner(pair[0]))
    run.publish()
    run.train()
    with pytest.raises(PublishFailed):
        run.publish(1)
    newest = head(store)
    assert newest.version == 0
    again = run.publish(2)
    assert again.anchor is not None
    run.close()
    replica = Replica(store, {}, required_keys=pair[1])
    replica.update()
    assert_same_bits(dict(replica.tensors), run.history[1])


def test_a_writer_that_lost_the_version_leaves_a_signature_that_nobody_asks_for(run: Run, pair: Pair) -> None:
    publish(run, pair[0], 2)
    other = Run(run.store)
    other.open(signer=KeySigner(pair[0]), resume="anchor")
    with pytest.raises(VersionConflict):
        run.publish(9)
    # Both signed version 2; one of them exists.
    assert len(list(run.store.list(layout.signature_prefix(2)))) == 2
    replica = Replica(run.store, {}, required_keys=pair[1])
    assert replica.update().writer.epoch == 2
    other.close()


# A trainer that goes on, in a bucket that others may write to.


@pytest.mark.parametrize("resume", ["auto", "anchor"])
def test_a_trainer_that_goes_on_signs_no_weights_of_others(run: Run, pair: Pair, resume: str) -> None:
    """To fence other publishers it begins with a version that has its parent's weights."""
    publish(run, pair[0])
    run.close()
    forged = forge(run.store)
    run.open(signer=KeySigner(pair[0]), resume=resume)
    newest = head(run.store)
    assert newest.version == forged + 1
    for version in (forged - 1, forged, forged + 1):
        with pytest.raises(Unsigned):
            Replica(run.store, {}, required_keys=pair[1]).update(version)
    first = run.publish(10)
    run.train()
    second = run.publish(11)
    assert first.delta is None and first.anchor is not None
    for held in ({}, dict(run.history[2])):
        replica = Replica(run.store, held, held=2 if held else None, required_keys=pair[1])
        for manifest in (first, second):
            replica.update(manifest.version)
            assert_same_bits(dict(replica.tensors), run.history[manifest.version])


def test_a_trainer_goes_on_from_its_own_version_before_a_forged_one(run: Run, pair: Pair) -> None:
    publish(run, pair[0])
    run.publish(3)
    run.close()
    forge(run.store)
    run.open(signer=KeySigner(pair[0]), resume="auto")
    claimed = head(run.store)
    assert (claimed.parent, claimed.delta is not None) == (3, True)
    run.train()
    last = run.publish(4)
    replica = Replica(run.store, dict(run.history[3]), held=3, required_keys=pair[1])
    for manifest in (claimed, last):
        replica.update(manifest.version)
    assert_same_bits(dict(replica.tensors), run.history[last.version])


def test_a_forged_version_with_the_trainers_digest_is_not_built_on(run: Run, pair: Pair) -> None:
    """Its payloads may have other weights with the same digest sums."""
    publish(run, pair[0])
    good = run.publish(3)
    run.close()
    edited(run.store, good.version, step=77)
    for resume in (True, good.version):
        with pytest.raises(ResumeMismatch, match="sign"):
            run.open(signer=KeySigner(pair[0]), resume=resume)
    run.open(signer=KeySigner(pair[0]), resume="auto")
    first = run.publish(4)
    assert (first.delta, first.anchor is None) == (None, False)
    Replica(run.store, {}, required_keys=pair[1]).update(first.version)


def test_a_parent_that_is_replaced_while_the_trainer_opens_is_not_signed_over(run: Run, pair: Pair) -> None:
    publish(run, pair[0])
    run.publish(3)
    run.close()
    inner, key, reads = run.store, layout.manifest_key(3), []
    good = inner.get(key)
    bad = manifest_json.to_json(replace(history.read_manifest(inner, 3), step=77))

    class Switching(FaultyStore):
        """Answers with another manifest from some read on."""

        def get(self, wanted: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().get(wanted, start, end)
            if wanted != key:
                return data
            reads.append(wanted)
            return (good if len(reads) < self.after else bad)[start:end]

        after = 0

    for after in range(1, 9):
        reads.clear()
        run.store = store = Switching(inner)
        store.after = after
        with suppress(PatchstoreError):
            run.open(signer=KeySigner(pair[0]), resume="auto")
            run.close()
        run.store = inner
        newest = head(inner)
        for version in range(4, newest.version + 1):
            found = history.read_manifest(inner, version)
            is_signed = bool(list(inner.list(layout.signature_prefix(version))))
            assert not (is_signed and found.parent_digest == digests.digest(bad)), after


def test_a_device_that_keeps_the_private_key_may_sign(run: Run, pair: Pair) -> None:
    class Device:
        public_key = PublicKey.read(pair[1])
        sign = KeySigner(pair[0]).sign

    run.open(signer=Device())
    run.publish_versions(2)
    run.publish(2)
    run.close()
    run.open(signer=Device(), resume=True)
    run.train()
    last = run.publish(3)
    assert last.parent is not None
    Replica(run.store, {}, required_keys=pair[1]).update(last.version)


def test_a_signer_that_fails_publishes_nothing(run: Run, pair: Pair) -> None:
    class Broken:
        public_key = PublicKey.read(pair[1])

        def sign(self, data: bytes) -> bytes:
            raise OSError("the hardware module is gone")

    run.open(signer=Broken())
    with pytest.raises(PublishFailed, match="the hardware module is gone"):
        run.publish()
    assert history.head(run.store) is None


# Wrong calls.


def test_wrong_keys_are_refused_with_a_sentence(tmp_path: Path, pair: Pair, store: MemoryStore) -> None:
    private, public = pair
    text = tmp_path / "text"
    text.write_text("no key")
    koblitz = key_pair(tmp_path, "koblitz", ec.SECP256K1())
    locked = key_pair(tmp_path, "locked", password=b"secret")[0]
    for path in (tmp_path / "none", tmp_path, text, public, koblitz[0], locked):
        with pytest.raises(UsageError):
            KeySigner(path)
    with pytest.raises(UsageError, match="password"):
        KeySigner(locked, password="wrong")
    with pytest.raises(UsageError, match="password"):
        KeySigner(private, password="secret")
    KeySigner(locked, password="secret")
    for path in (tmp_path / "none", text, koblitz[1]):
        with pytest.raises(UsageError):
            RequiredKeys.of(path)
    with pytest.raises(UsageError, match="private key") as refused:
        RequiredKeys.of(private)
    assert private.read_text().splitlines()[1] not in str(refused.value)
    for given in ([], 3, b"key", [3]):
        with pytest.raises(UsageError):
            RequiredKeys.of(given)  # type: ignore[arg-type]
    for signer in (str(private), object(), 3):
        with pytest.raises(UsageError):
            Publisher(store, {"a": torch.zeros(3)}, signer=signer)  # type: ignore[arg-type]
    assert not list(store.list())


def test_a_replica_has_the_signatures_before_the_manifests(run: Run, pair: Pair) -> None:
    publish(run, pair[0])
    inner = MemoryStore("memory://near")
    near = FaultyStore(inner)
    replicator = Replicator(run.store, near)
    replicator.open()
    assert len(list(replicator.versions())) == 3
    written = [key for verb, key in near.calls if verb == "put"]
    for version in range(3):
        signature, manifest = signature_of(run.store, version), layout.manifest_key(version)
        assert written.index(signature) < written.index(manifest)
        assert inner.get(signature) == run.store.get(signature)
        Replica(inner, {}, required_keys=pair[1]).update(version)


# `patchstore sign`.


def test_the_command_signs_what_exists(tmp_path: Path, pair: Pair, patchstore: Cli) -> None:
    run = Run(open_store(tmp_path / "bucket"))
    run.publish_and_close(6)
    required = ("--require-signature", pair[1])
    assert patchstore("verify", tmp_path / "bucket", *required)[0] == 3
    sign = ("sign", tmp_path / "bucket", "--key", pair[0])
    code, out, _ = patchstore(*sign)
    assert (code, out.startswith("6 of 6 versions signed")) == (0, True)
    assert patchstore(*sign)[1].startswith("0 of 6 versions signed")
    assert patchstore("verify", tmp_path / "bucket", "--all", *required)[0] == 0
    assert patchstore("verify", tmp_path / "bucket", "--all")[0] == 0
    assert patchstore("replay", tmp_path / "bucket", tmp_path / "out", *required)[0] == 0
    for wrong in (["--from", 3, "--to", 2], ["--to", 6], ["--key", tmp_path / "none"]):
        assert patchstore(*sign, *wrong)[0] == 2


def test_the_stock_command_signs_a_replayed_folder(run: Run, pair: Pair, tmp_path: Path) -> None:
    run.publish_versions(2)
    folder, signature = tmp_path / "folder", tmp_path / "folder.sig"
    replay(run.store, out=folder)
    made = model_signing("sign", "key", folder, "--signature", signature, "--private_key", pair[0])
    assert made.returncode == 0, made.stdout + made.stderr
    arguments = ("verify", "key", folder, "--signature", signature, "--public_key", pair[1])
    assert model_signing(*arguments).returncode == 0
    payload = next(folder.glob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"!")
    assert model_signing(*arguments).returncode != 0
