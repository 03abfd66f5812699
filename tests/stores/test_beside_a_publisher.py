"""The process that adds anchors beside a publisher opens the store with the publisher's options."""

from contextlib import closing
from typing import Any

import pytest

from patchstore import open_store
from patchstore.publish import compactor as beside
from tests.support.beside import check_beside
from tests.support.hub.server import TOKEN, Hub


@pytest.mark.exhaustive
def test_it_works_with_the_options_of_s3(
    ministack_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "INTERVAL_S", 0.1)
    given = {name: value for name, value in ministack_options.items() if name != "session"}
    options = {**given, "key": "an-access-key", "secret": "a-secret-key"}
    with closing(open_store("s3://bucket/beside", **options)) as store:
        check_beside(store, ("an-access-key", "a-secret-key"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("single_writer", [False, True])
def test_it_works_with_the_options_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, hub: Hub, s3_url: str, *, single_writer: bool
) -> None:
    monkeypatch.setattr(beside, "INTERVAL_S", 0.1)
    by_word = {"endpoint": hub.url, "token": TOKEN, "single_writer": True}
    options = by_word if single_writer else hub.options("user")
    url = f"hf://buckets/user/bucket/{s3_url.rpartition('/')[2]}"
    with closing(open_store(url, **options)) as store:
        check_beside(store, tuple(options[name] for name in options.keys() & {"token", "gateway_secret"}))
