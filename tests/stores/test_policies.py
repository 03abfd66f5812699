"""The rights that docs/recipes.md gives on S3 are enough for each task, and none of them is too much."""

import fnmatch
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moto.s3.exceptions import S3AccessDeniedError

from patchstore import Publisher, open_store, replay, verify
from patchstore.errors import UsageError
from patchstore.ops.retention import Retention, collect, retire, tag
from patchstore.stores.base import PART_BYTES, Store
from patchstore.stores.layout import manifest_key
from tests.support.pages import blocks

RUN = "s3://bucket/my-run"
ROLES = dict(
    zip(
        ("reader", "trainer", "retention"),
        [
            json.loads(block.code)
            for block in blocks("docs/recipes.md", "json")
            if block.section == "S3: rights"
        ],
        strict=True,
    )
)


def many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Gate:
    """In the place of moto's own `S3IAMRequest`: a policy answers for the role that is the request's key."""

    def __init__(self) -> None:
        self.used: set[tuple[str, str]] = set()
        """Role and action of every right that was made use of."""

    def __call__(self, *, headers: Any, data: dict[str, str], **_: Any) -> SimpleNamespace:
        check = partial(self.check, headers["Authorization"], f"s3:{data['Action']}")
        return SimpleNamespace(check_signature=lambda: None, check_action_permitted=check)

    def check(self, authorization: str, action: str, place: str) -> None:
        role = re.search(r"Credential=(\w+)", authorization)[1]  # type: ignore[index]
        if role not in ROLES:
            return
        applied = [
            statement["Effect"]
            for statement in ROLES[role]["Statement"]
            if action in many(statement["Action"])
            and any(fnmatch.fnmatchcase(place, each) for each in many(statement["Resource"]))
        ]
        if "Deny" in applied or "Allow" not in applied:
            raise S3AccessDeniedError
        self.used.add((role, action))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr("moto.iam.access_control.S3IAMRequest", gate)
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
    return gate


@pytest.fixture
def opened_as(gate: Gate, s3_options: dict[str, Any], client: str) -> Iterator[Callable[..., Store]]:
    """Open the run, or another place, as one of the roles."""
    stores: list[Store] = []

    def open_as(role: str, url: str = RUN) -> Store:
        options = {**s3_options, "key": role, "secret": "secret", "client": client}
        stores.append(open_store(url, **options))
        return stores[-1]

    yield open_as
    owner = open_as("owner")
    for key in list(owner.list()):
        owner.delete(key)
    for store in stores:
        store.close()


def test_each_role_can_do_its_task_and_has_no_other_right(
    gate: Gate, opened_as: Callable[..., Store], tmp_path: Path
) -> None:
    trainer, reader, retention = (opened_as(role) for role in ("trainer", "reader", "retention"))
    # An anchor that goes up in parts.
    model = {"w": torch.zeros(PART_BYTES, dtype=torch.bfloat16), "b": torch.zeros(8, dtype=torch.bfloat16)}
    with Publisher(trainer, model) as publisher:
        for step in range(3):
            publisher.publish_patch(step)
            model["b"] += 1

    def interrupted() -> Iterator[bytes]:
        yield bytes(2 * PART_BYTES)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.upload("anchors/interrupted", interrupted())
    assert verify(reader).version == 2
    replay(reader, out=tmp_path / "replay")
    tag(retention, "best", 1)
    retire(retention, Retention(keep_last=1), dry_run=False)
    collect(retention, dry_run=False)
    granted = {
        (role, action)
        for role, policy in ROLES.items()
        for statement in policy["Statement"]
        if statement["Effect"] == "Allow"
        for action in many(statement["Action"])
    }
    assert gate.used == granted


def test_no_role_can_do_more(opened_as: Callable[..., Store]) -> None:
    trainer, reader, retention = (opened_as(role) for role in ("trainer", "reader", "retention"))
    with Publisher(trainer, {"w": torch.zeros(8)}) as publisher:
        publisher.publish_patch(0)
    for store, key in ((reader, "probes/x"), (trainer, manifest_key(0)), (retention, manifest_key(0))):
        with pytest.raises(UsageError, match=r"denied|Denied|403"):
            store.put(key, b"x") if store is reader else store.delete(key)
    for role in ROLES:
        with pytest.raises(UsageError):
            opened_as(role, "s3://bucket/my-run-2").get(manifest_key(0))
