"""What `patchstore doctor` finds, by kind."""

from typing import Any

from patchstore.ops.doctor import Finding, examine
from patchstore.stores.base import Store

WRITTEN = ["write", "create-only", "read-after-write", "listing", "ranges", "latency", "throughput"]
OF_A_RUN = ["run", "dtypes", "lineage", "payloads"]


def found(store: Store | str, *servers: str, **options: Any) -> dict[str, Finding]:
    """All that was found, by kind."""
    every = [*examine(store, servers, **{"num_bytes": 1_000_000, **options})]
    by_kind = {finding.kind: finding for finding in every}
    assert len(by_kind) == len(every), "a kind was found twice"
    return by_kind


def wrong(findings: dict[str, Finding]) -> list[str]:
    return [kind for kind, finding in findings.items() if finding.level != "ok"]
