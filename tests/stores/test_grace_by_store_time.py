"""Going back, retirement and collection over the protocols of S3 and the Hub: the server's clock counts."""

from datetime import UTC, datetime, timedelta

import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history, kept, notes
from patchstore.bucket.manifest_json import time_of
from patchstore.bucket.notes import GRACE
from patchstore.ops.retention import Retention, collect, retire
from patchstore.publish import commit as committer
from patchstore.stores.base import Store


def hours(count: float) -> datetime:
    return datetime.now(UTC) + timedelta(hours=count)


@pytest.mark.parametrize("any_store", ["s3fs", "obstore", "hub"], indirect=True)
def test_a_machine_whose_clock_is_wrong_gives_the_full_grace_period(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "now", lambda: hours(-24).strftime("%Y-%m-%dT%H:%M:%SZ"))
    weights = {"weight": torch.zeros(20)}
    with Publisher(any_store, weights, anchor_every=2) as publisher:
        for step in range(5):
            weights["weight"][step] = 1
            publisher.publish_patch(step).result()
    weights["weight"][3:] = 0
    # It goes on from version 2, and holds that for a moment.
    with Publisher(any_store, weights, resume=True):
        assert history.read_manifest(any_store, 5).parent == 2
    assert list(any_store.list("reservations/")) == []
    # The machine that retires is 23 hours behind, and the one that collects as far ahead.
    monkeypatch.setattr(kept, "utc_now", lambda: hours(-23))
    assert retire(any_store, Retention(keep_last=1), dry_run=False).retired == ((0, 1), (3, 4))
    (record,) = notes.retirements(any_store).records
    stored_at = any_store.stored_at(record.key)
    assert stored_at is not None
    assert time_of(record.not_before) >= stored_at + GRACE - timedelta(minutes=10)
    monkeypatch.setattr(kept, "utc_now", lambda: hours(23))
    assert collect(any_store, dry_run=False).num_waiting == 4
    assert list(any_store.list("probes/")) == []
