"""The names that users may rely on; a change here is a change for them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import patchstore
from patchstore import errors

SURFACE = {
    "Diff",
    "LocalPart",
    "Manifest",
    "PatchstoreError",
    "Payload",
    "PeftAdapter",
    "Plan",
    "Publication",
    "Publisher",
    "Replica",
    "Run",
    "Schema",
    "Store",
    "TensorDiff",
    "TensorSpec",
    "Version",
    "as_saved",
    "errors",
    "interleaved_qkv",
    "joined_gate_up",
    "mapped",
    "open",
    "open_store",
    "replay",
    "verify",
    "wait_until",
    "without_padding",
}

KINDS = {
    "already-exists",
    "consumer-failed",
    "corrupt-object",
    "data",
    "device-memory",
    "driver-conflict",
    "engines-differ",
    "error",
    "half-applied",
    "internal",
    "is-replica",
    "load-failed",
    "not-found",
    "os",
    "other-run",
    "other-server",
    "publish-failed",
    "rank-failed",
    "rank-lost",
    "resume-mismatch",
    "rollback",
    "run-exists",
    "run-lost",
    "schema-mismatch",
    "server-unavailable",
    "stale-caches",
    "state-mismatch",
    "store",
    "store-replaced",
    "store-unavailable",
    "unsigned",
    "unsupported-format",
    "unsupported-store",
    "usage",
    "version-conflict",
    "version-not-found",
    "version-retired",
    "wait-timeout",
    "wrong-parent",
    "wrong-signature",
}


def test_the_package_offers_these_names_and_no_others() -> None:
    assert set(patchstore.__all__) == SURFACE
    assert {name for name in dir(patchstore) if not name.startswith("_")} == SURFACE


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_each_name_loads_and_is_documented(name: str) -> None:
    value = getattr(patchstore, name)
    assert inspect.ismodule(value) == (name == "errors")
    assert value.__doc__


@pytest.mark.parametrize("name", sorted(SURFACE - {"PatchstoreError", "errors"}))
def test_names_stay_themselves_whatever_was_imported_before(name: str) -> None:
    home = importlib.import_module(getattr(patchstore, name).__module__)
    assert getattr(patchstore, name) is getattr(home, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = patchstore.missing


def test_every_error_has_a_kind_of_its_own_and_the_kinds_are_stable() -> None:
    found = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.PatchstoreError)
    ]
    kinds = [error.kind for error in found]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == KINDS


def test_the_page_lists_every_kind_with_its_class() -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (`[a-z-]+`.*?) \| (`\w+`.*?) \|", page, re.MULTILINE)
    listed = {
        kind: name
        for kinds, names in rows
        for kind, name in zip(re.findall(r"`([a-z-]+)`", kinds), re.findall(r"`(\w+)`", names), strict=True)
    }
    assert listed.keys() == KINDS
    assert all(getattr(errors, name).kind == kind for kind, name in listed.items())
