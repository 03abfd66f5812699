"""Whether the run in a store can be followed: its newest version, the chain to it, and their payloads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from patchstore.doctor.bucket import Bucket
from patchstore.doctor.finding import Check, Finding
from patchstore.doctor.store_checks import megabytes
from patchstore.errors import (
    CorruptObject,
    DataError,
    NotFound,
    UnsupportedFormat,
    VersionNotFound,
    WrongParent,
)
from patchstore.format import dtypes, history, json_fields, lineage, replica_mark
from patchstore.format.records import FORMAT_VERSION, Payload, Plan
from patchstore.format.replica_mark import ReplicaMark

_NUM_ASKED_AT_ONCE = 16
_NEW_ANCHOR = "publish an anchor, with Publisher(resume='anchor'), or restore the object from a backup"


def _read(bucket: Bucket) -> Iterator[Finding]:
    try:
        mark = replica_mark.read(bucket.store)
        bucket.header = history.read_header(bucket.store)
        if bucket.header is not None:
            bucket.head = history.head(bucket.store)
            history.check_newest(bucket.store, bucket.head)
    except UnsupportedFormat as exc:
        found = f"{exc}; this release knows format {FORMAT_VERSION}"
        yield bucket.finding("format-unknown", found, "install the trainer's release of patchstore")
        return
    except DataError as exc:
        advice = "restore the object from a backup, or publish to another prefix"
        yield bucket.finding("run-unreadable", str(exc), advice)
        return
    if mark is not None:
        yield bucket.finding("replica", _replica(mark))
    if bucket.header is None or bucket.head is None:
        yield bucket.finding("no-run", "holds no version yet; the first publication makes the run")
        return
    header, head = bucket.header, bucket.head
    yield bucket.finding(
        "run",
        f"run {header.run_id}, format {FORMAT_VERSION}, {len(header.schema.tensors):,} tensors of "
        f"{megabytes(header.schema.num_bytes)}; {head.version + 1} versions, the newest is {head.version} "
        f"(step {head.step}), {_age(head.created_at, bucket.now())} old, by {head.writer.id} "
        f"(epoch {head.writer.epoch})",
    )
    yield bucket.finding("dtypes", f"serves {dtypes.of_schema(header.schema)}")


def _replica(mark: ReplicaMark) -> str:
    if mark.promoted_at is not None:
        return f"was a replica of {mark.source}, and was promoted at {mark.promoted_at}: publishers may write"
    return f"a replica of {mark.source}: servers may follow it, and publishers are refused"


def _age(created_at: str, now: float) -> str:
    seconds = max(0.0, now - json_fields.time_of(created_at).timestamp())
    for unit, length_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _lineage(bucket: Bucket) -> Iterator[Finding]:
    if bucket.head is None:
        return
    try:
        plan = _plan(bucket)
    except (CorruptObject, VersionNotFound, WrongParent) as exc:
        advice = f"{_NEW_ANCHOR}; readers that hold a later version are not affected"
        yield bucket.finding("lineage-broken", str(exc), advice)
        return
    assert plan.anchor is not None
    yield bucket.finding(
        "lineage",
        f"the chain is whole: {_deltas(plan)} from anchor {plan.anchor.version} to the newest "
        f"version, {megabytes(plan.num_bytes)} in all",
    )


def _deltas(plan: Plan) -> str:
    return "1 delta leads" if len(plan.deltas) == 1 else f"{len(plan.deltas)} deltas lead"


def _plan(bucket: Bucket) -> Plan:
    """The plan of a reader without any version for the newest one."""
    assert bucket.head is not None
    target = bucket.head.version
    return lineage.read(bucket.store, target).plan()


def _payloads(bucket: Bucket) -> Iterator[Finding]:
    if bucket.head is None:
        return
    plan = _plan(bucket)
    assert plan.anchor is not None and plan.anchor.anchor is not None
    payloads = [*plan.anchor.anchor.payloads, *plan.anchor.anchor.files]
    payloads += [each for version in plan.deltas if version.delta for each in version.delta.payloads]

    def size(payload: Payload) -> int | None:
        try:
            return bucket.store.size(payload.key)
        except NotFound:
            return None

    with ThreadPoolExecutor(_NUM_ASKED_AT_ONCE, thread_name_prefix="patchstore-doctor") as pool:
        sizes = dict(zip(payloads, pool.map(size, payloads), strict=True))
    missing = [payload.key for payload, found in sizes.items() if found is None]
    wrong = [payload for payload, found in sizes.items() if found not in {None, payload.size}]
    if missing:
        found = f"{len(missing)} of {len(payloads)} payloads are missing, such as {missing[0]}"
        yield bucket.finding("payload-missing", found, _NEW_ANCHOR)
    if wrong:
        first = wrong[0]
        found = (
            f"{len(wrong)} of {len(payloads)} payloads have other sizes than their manifests say, such as "
            f"{first.key}: expected {first.size:,} bytes, found {sizes[first]:,}"
        )
        yield bucket.finding("payload-size", found, _NEW_ANCHOR)
    if not missing and not wrong:
        yield bucket.finding(
            "payloads",
            f"its {len(payloads)} payloads are all there in their sizes; patchstore verify checks their bits",
        )


CHECKS: tuple[Check[Bucket], ...] = (
    Check(name="the run", look=_read, needs=("the answer",)),
    Check(name="the chain of versions", look=_lineage, needs=("the run",)),
    Check(name="payloads", look=_payloads, needs=("the chain of versions",)),
)
