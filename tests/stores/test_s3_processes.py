"""Stores in S3 in a process that was forked from one with stores: used, or refused with a sentence."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

CLIENTS = ["s3fs", "obstore"]
_PROGRAM = """
import json, os, sys, time
from patchstore.errors import PatchstoreError
from patchstore.stores import open_store

url, endpoint, client, how = sys.argv[1:]
options = {"endpoint_url": endpoint, "key": "test", "secret": "test", "timeout_s": 20}
store = open_store(url, **options, client=client)
if how != "unused":
    store.put("a", b"x")
read, write = os.pipe()
if os.fork() == 0:
    said = {}
    try:
        if how == "anew":
            store = open_store(url, **options, client=client)
        elif how == "auto":
            store = open_store(url, **options)
            said["client"] = store.client
        for name, ask in {
            "put": lambda: store.put("b", b"y"), "get": lambda: store.get("a").decode(),
            "size": lambda: store.size("a"), "list": lambda: list(store.list()),
            "upload": lambda: store.upload("c", [b"z"]), "delete": lambda: store.delete("b"),
        }.items():
            try:
                said[name] = ask()
            except PatchstoreError as exc:
                said[name] = f"{type(exc).__name__}: {exc}"
        store.close()
    except PatchstoreError as exc:
        said["open"] = f"{type(exc).__name__}: {exc}"
    os.write(write, json.dumps(said).encode())
    os._exit(0)
os.close(write)
print(b"".join(iter(lambda: os.read(read, 65536), b"")).decode())
os.wait()
store.put("a", b"x")
store.close()
"""


def forked(s3_options: dict[str, Any], s3_url: str, client: str, how: str) -> dict[str, Any]:
    """What a child's requests said; those of its parent, after it, succeed."""
    if client == "obstore" or how == "auto":
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
    command = [sys.executable, "-c", _PROGRAM, s3_url, s3_options["endpoint_url"], client, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            said = process.communicate(timeout=120)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the child with it
            raise
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("how", ["used", "unused"])
def test_a_store_that_was_opened_before_the_fork_is_refused(
    s3_options: dict[str, Any], s3_url: str, client: str, how: str
) -> None:
    said = forked(s3_options, s3_url, client, how)
    assert set(said) == {"put", "get", "size", "list", "upload", "delete"}
    for operation, text in said.items():
        assert text.startswith(f"UsageError: {s3_url}: {operation}")
        assert "of which this one is a fork" in text
        assert "open it again" in text and "spawn" in text


def test_s3fs_works_in_a_store_that_the_child_opens(s3_options: dict[str, Any], s3_url: str) -> None:
    said = forked(s3_options, s3_url, "s3fs", "anew")
    assert said["get"] == "x" and said["list"] == ["a", "b"]
    assert said["put"] is said["upload"] is said["delete"] is None


def test_obstore_is_refused_there_if_the_parent_used_it(s3_options: dict[str, Any], s3_url: str) -> None:
    said = forked(s3_options, s3_url, "obstore", "anew")
    assert set(said) == {"open"}
    assert said["open"].startswith(f"UsageError: {s3_url}: open: process ")
    assert "used obstore before this one was forked" in said["open"] and "client='s3fs'" in said["open"]


def test_left_to_itself_the_store_goes_through_s3fs_there(s3_options: dict[str, Any], s3_url: str) -> None:
    said = forked(s3_options, s3_url, "obstore", "auto")
    assert said["client"] == "s3fs"
    assert said["get"] == "x" and said["list"] == ["a", "b"]
