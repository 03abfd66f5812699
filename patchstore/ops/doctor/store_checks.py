"""Check whether a store can be reached, has the guarantees that versions need, and is fast; and whether the
run there can be followed: its newest version, the chain to it, and their payloads.

Everything is tried with the store's own operations, on keys under `probes/` that are removed afterwards:
some services do not behave as they are documented.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from statistics import median

import httpx

from patchstore.bucket import history, manifest_json, notes, schema_text
from patchstore.bucket.notes import ReplicaMark
from patchstore.bucket.records import FORMAT_VERSION, Payload, Plan
from patchstore.errors import (
    AlreadyExists,
    CorruptObject,
    DataError,
    NotFound,
    PatchstoreError,
    StoreUnavailable,
    UnsupportedFormat,
    UnsupportedStore,
    UsageError,
    VersionNotFound,
    WrongParent,
)
from patchstore.follow import http_client
from patchstore.ops.doctor.finding import Bucket, Check, Finding
from patchstore.read.run import Run, payloads_over
from patchstore.stores import Store, layout
from patchstore.stores.base import PART_BYTES
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.stores.probe import check_create_only
from patchstore.support.printable import duration

_COMPACT = "run `patchstore compact`, which makes what is damaged anew; until then readers take another way"
_NEW_ANCHOR = "publish an anchor, with Publisher(resume='anchor'), or restore the object from a backup"
_SMALL = os.urandom(1000)
_NUM_TIMED = 10
_CLOCK_OFF_S = 30
_CLOCK_WRONG_S = 900
"""From here on S3 refuses signatures."""
_SKEWED = "RequestTimeTooSkewed"
_SET_THE_CLOCK = "set this machine's clock (timedatectl set-ntp true, or the host's in a container)"
_GATEWAY = "-o gateway_key=... -o gateway_secret=... (S3 credentials of the same account on the Hub)"


def _open(bucket: Bucket) -> Iterator[Finding]:
    try:
        bucket.open()
    except UnsupportedStore as exc:
        yield bucket.finding("store-unsupported", str(exc), "do what it says, or use s3:// or a folder")
    except UsageError as exc:
        yield bucket.finding("store-url", str(exc), "correct the URL, or the --option that it names")
    else:
        yield from _folder(bucket)


def _folder(bucket: Bucket) -> Iterator[Finding]:
    """Report that a folder does not exist: a misspelt path looks like a new store."""
    if bucket.folder is None:
        return
    nearest = next(each for each in (bucket.folder, *bucket.folder.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        found = f"{nearest} is a file, and a store is a folder"
        yield bucket.finding("store-url", found, "give the path of a folder")
    elif bucket.is_new:
        may = "may" if os.access(nearest, os.W_OK | os.X_OK) else "may not"
        found = f"there is no folder {bucket.folder}; this user {may} make it in {nearest}"
        advice = "check the path; for a new run do nothing, as the first publication makes the folder"
        yield bucket.finding("no-folder", found, advice)


def _answer(bucket: Bucket) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        bucket.store.get(layout.HEADER, 0, 1)
    except NotFound:
        pass
    except (UsageError, StoreUnavailable) as exc:
        yield _no_answer(bucket, exc)
        return
    spent_s = time.monotonic() - began
    yield bucket.finding("store", f"opens, and answered its first request in {_ms(spent_s)}")


def _no_answer(bucket: Bucket, exc: PatchstoreError) -> Finding:
    if _is_skewed(exc):
        return bucket.finding("clock-wrong", f"the store refuses this machine's time: {exc}", _SET_THE_CLOCK)
    if isinstance(exc, StoreUnavailable):
        advice = "check the address (-o endpoint_url=... for S3), the network, and a proxy in between"
        return bucket.finding("store-unreachable", str(exc), advice)
    if isinstance(exc.__cause__, FileNotFoundError):
        return bucket.finding("no-bucket", str(exc), "create the bucket, or correct its name in the URL")
    return bucket.finding("store-refused", str(exc), _credentials(bucket.url))


def _credentials(url: str) -> str:
    if _is_hub(url):
        return "log in (hf auth login, or HF_TOKEN) as a user who may use this bucket; create it if need be"
    if url.startswith("s3"):
        return (
            "give credentials (-o key=... -o secret=..., -o profile=..., or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY) that are allowed s3:GetObject, s3:ListBucket, without which S3 refuses "
            "what does not exist, and for publishers s3:PutObject"
        )
    return "give this user the right to read there"


def _clock(bucket: Bucket) -> Iterator[Finding]:
    if isinstance(bucket.store, FolderStore):
        return
    if isinstance(bucket.store, MemoryStore):
        yield bucket.finding("clock", "is in this process, and has its clock")
        return
    url = bucket.store.endpoint
    if url is None:
        yield bucket.finding("clock-unknown", "has no clock that can be asked over HTTP")
        return
    before = bucket.now()
    try:
        with http_client.client(url, timeout_s=10) as asked:
            date = asked.get(url).headers.get("Date")
    except httpx.HTTPError as exc:
        yield bucket.finding("clock-unknown", f"{url} did not tell the time: {type(exc).__name__}")
        return
    if date is None:
        yield bucket.finding("clock-unknown", f"{url} did not tell the time")
        return
    yield _compared(bucket, (before + bucket.now()) / 2 - parsedate_to_datetime(date).timestamp())


def _folder_clock(bucket: Bucket) -> Iterator[Finding]:
    if isinstance(bucket.store, FolderStore):
        with bucket.probes() as key:
            name = key("clock")
            bucket.store.put(name, b"")
            written = Path(bucket.store.url, name).stat().st_mtime
            yield _compared(bucket, bucket.now() - written)


def _compared(bucket: Bucket, ahead_s: float) -> Finding:
    side = "ahead of" if ahead_s > 0 else "behind"
    off = f"this machine's clock is {abs(ahead_s):,.0f} s {side} the store's"
    if abs(ahead_s) >= _CLOCK_WRONG_S:
        found = f"{off}; S3 refuses all requests from {_CLOCK_WRONG_S} s on"
        return bucket.finding("clock-wrong", found, _SET_THE_CLOCK)
    if abs(ahead_s) >= _CLOCK_OFF_S:
        return bucket.finding("clock-off", off, _SET_THE_CLOCK)
    return bucket.finding("clock", f"this machine's clock and the store's are {abs(ahead_s):.1f} s apart")


def _write(bucket: Bucket) -> Iterator[Finding]:
    with bucket.probes() as key:
        try:
            bucket.store.put(key("write"), _SMALL)
        except UsageError as exc:
            advice = "allow this user to write (s3:PutObject on S3), or say --read-only where it only follows"
            yield bucket.finding("write-refused", str(exc), advice)
            return
    yield bucket.finding("write", "takes new objects")


def _damage(bucket: Bucket) -> Iterator[Finding]:
    """Try whether the service notices bytes that change on the way, as a proxy or a bad link changes them."""
    if not bucket.url.startswith(("s3://", "s3a://")):
        return
    from patchstore.stores.s3 import S3Store

    if not isinstance(bucket.store, S3Store):
        return
    with bucket.probes() as key:
        is_stored = bucket.store.takes_damage(key("damaged"))
    if not is_stored:
        yield bucket.finding("body-check", "refuses an object of which a bit changed on the way")
    elif (bucket.store.endpoint or "").startswith("https:"):
        found = "does not compare an object with its checksum; TLS keeps it from damage on the way"
        yield bucket.finding("body-check", found)
    else:
        yield bucket.finding(
            "body-unchecked",
            "stored an object of which a bit changed on the way: it compares neither signature nor checksum",
            "use https:// in endpoint_url, or another service; leave request_checksum_calculation as it is; "
            "readers notice damaged payloads, and the version is lost then",
        )


def _create_only(bucket: Bucket) -> Iterator[Finding]:
    if bucket.store.single_writer:
        other = f"give {_GATEWAY}" if _is_hub(bucket.url) else "use a folder or s3://"
        yield bucket.finding(
            "single-writer",
            "cannot create an object only once, and you promised (single_writer) that nothing else "
            "publishes here: a second publisher is not kept out, only sometimes detected",
            f"start one publisher only; to have a second one kept out, {other} instead of single_writer",
        )
        bucket.can_create = True
        return
    try:
        check_create_only(bucket.store)
    except UnsupportedStore as exc:
        if _is_hub(bucket.url):
            advice = f"give {_GATEWAY}; or -o single_writer=true, a promise that nothing else publishes here"
            yield bucket.finding("gateway-missing", str(exc), advice)
            return
        advice = "use a folder, or an S3 service that honours If-None-Match on PutObject"
        yield bucket.finding("create-only-broken", str(exc), advice)
        return
    bucket.can_create = True
    yield bucket.finding("create-only", "creates an object only once: in turn, and in 5 races of 8 writers")


def _read_after_write(bucket: Bucket) -> Iterator[Finding]:
    # Several, because a lag shows only sometimes.
    with bucket.probes() as key:
        late = 0
        for number in range(_NUM_TIMED):
            name = key(number)
            bucket.store.put(name, _SMALL)
            try:
                late += bucket.store.get(name) != _SMALL or bucket.store.size(name) != len(_SMALL)
            except NotFound:
                late += 1
    if late:
        found = f"of {_NUM_TIMED} objects {late} could not be read as they had just been written"
        advice = "remove caches and replicas in front of the store: a publisher reads back what it committed"
        yield bucket.finding("read-lags", found, advice)
    else:
        yield bucket.finding(
            "read-after-write", f"{_NUM_TIMED} objects were read as they had just been written"
        )


def _listing(bucket: Bucket) -> Iterator[Finding]:
    with bucket.probes() as key:
        names = [key(number) for number in range(_NUM_TIMED)]
        for name in names:
            bucket.store.put(name, b"")
        listed = {*bucket.store.list(names[0].removesuffix("0"))}
    if late := len({*names} - listed):
        found = f"of {_NUM_TIMED} new objects {late} were not listed at once"
        advice = "nothing is lost, as listings are only where probing starts; first looks take longer"
        yield bucket.finding("listing-lags", found, advice)
    else:
        yield bucket.finding("listing", f"{_NUM_TIMED} new objects were listed at once")


def _ranges(bucket: Bucket) -> Iterator[Finding]:
    with bucket.probes() as key:
        name, size = key("ranges"), len(_SMALL)
        bucket.store.put(name, _SMALL)
        # The first and the last bytes, some between, what crosses the end, and what lies beyond it.
        asked = ((0, 1), (size - 1, size), (100, 900), (size - 5, size + 5), (size + 5, size + 9), (7, None))
        wrong = [span for span in asked if bucket.store.get(name, *span) != _SMALL[slice(*span)]]
    if wrong:
        first, end = wrong[0]
        found = f"answered {len(wrong)} of {len(asked)} ranges with other bytes, such as {first} to {end}"
        yield bucket.finding("ranges-wrong", found, "use another service: payloads are read in ranges")
    else:
        yield bucket.finding("ranges", f"{len(asked)} ranges of an object had the right bytes")


def _latency(bucket: Bucket) -> Iterator[Finding]:
    def timed(call: Callable[..., object], *args: object, **kwargs: object) -> float:
        began = time.monotonic()
        call(*args, **kwargs)
        return time.monotonic() - began

    with bucket.probes() as key:
        names = [key(number) for number in range(2 * _NUM_TIMED)]
        put, get = bucket.store.put, bucket.store.get
        spent = {
            "put": [timed(put, name, _SMALL) for name in names[:_NUM_TIMED]],
            "get": [timed(get, name) for name in names[:_NUM_TIMED]],
        }
        if bucket.can_create:
            spent["create-only put"] = [timed(_create, bucket.store, name) for name in names[_NUM_TIMED:]]
    each = (f"{name} {_ms(median(times))} ({_ms(max(times))} at worst)" for name, times in spent.items())
    yield bucket.finding("latency", f"of 1 kB, {_NUM_TIMED} times: {', '.join(each)}")


def _create(store: Store, key: str) -> None:
    try:
        store.put(key, _SMALL, if_absent=True)
    except AlreadyExists:
        # Our own, the answer to which was lost on the way.
        return


def _throughput(bucket: Bucket) -> Iterator[Finding]:
    payload = os.urandom(bucket.num_bytes)
    view = memoryview(payload)
    with bucket.probes() as key:
        name = key("payload")
        began = time.monotonic()
        bucket.store.upload(name, (view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)))
        stored = time.monotonic()
        read = b"".join(bucket.store.read(name))
        done = time.monotonic()
    if read != payload:
        found = f"{megabytes(len(payload))} came back as {megabytes(len(read))} with other bits"
        advice = "do not train on this store: find what changes bytes between here and there, such as a proxy"
        yield bucket.finding("payload-wrong", found, advice)
        return
    up, down = (megabytes(len(payload) / spent_s) for spent_s in (stored - began, done - stored))
    found = f"{megabytes(len(payload))} went up at {up}/s and down at {down}/s, and came back bit for bit"
    yield bucket.finding("throughput", found)


def _left_behind(bucket: Bucket) -> Iterator[Finding]:
    if bucket.num_left:
        found = f"at least {bucket.num_left} objects of this examination could not be removed"
        advice = f"remove {layout.PROBES} by hand, or allow s3:DeleteObject; publishing does not need it"
        yield bucket.finding("left-behind", found, advice)


def _is_hub(url: str) -> bool:
    return url.startswith("hf://")


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _is_skewed(exc: BaseException | None) -> bool:
    """Whether S3 refuses a request for its time: it says so in the message, or in the answer to a cause."""
    while exc is not None:
        response = getattr(exc, "response", None)
        if _SKEWED in str(exc) or (isinstance(response, Mapping) and _SKEWED in str(response)):
            return True
        exc = exc.__cause__
    return False


CHECKS: tuple[Check[Bucket], ...] = (
    Check(name="the URL", look=_open),
    Check(name="the answer", look=_answer, needs=("the URL",)),
    Check(name="the clock", look=_clock, needs=("the URL",)),
    Check(name="writing", look=_write, needs=("the answer",), writes=True),
    Check(name="a folder's clock", look=_folder_clock, needs=("writing",), writes=True),
    Check(name="what is damaged on the way", look=_damage, needs=("writing",), writes=True),
    Check(name="creating only once", look=_create_only, needs=("writing",), writes=True),
    Check(name="reading what was written", look=_read_after_write, needs=("writing",), writes=True),
    Check(name="listing", look=_listing, needs=("writing",), writes=True),
    Check(name="ranges", look=_ranges, needs=("writing",), writes=True),
    Check(name="latency", look=_latency, needs=("writing",), writes=True),
    Check(name="throughput", look=_throughput, needs=("writing",), writes=True),
    Check(name="removing", look=_left_behind),
)


# The run there.


def _read(bucket: Bucket) -> Iterator[Finding]:
    try:
        mark = notes.read_mark(bucket.store)
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
    age_s = bucket.now() - manifest_json.time_of(head.created_at).timestamp()
    yield bucket.finding(
        "run",
        f"run {header.run_id}, format {FORMAT_VERSION}, {len(header.schema.tensors):,} tensors of "
        f"{megabytes(header.schema.num_bytes)}; {head.version + 1} versions, the newest is {head.version} "
        f"(step {head.step}), {duration(age_s)} old, by {head.writer.id} "
        f"(epoch {head.writer.epoch})",
    )
    yield bucket.finding("dtypes", f"serves {schema_text.of_schema(header.schema)}")


def _replica(mark: ReplicaMark) -> str:
    if mark.promoted_at is not None:
        return f"was a replica of {mark.source}, and was promoted at {mark.promoted_at}: publishers may write"
    return f"a replica of {mark.source}: servers may follow it, and publishers are refused"


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
    assert bucket.header is not None and bucket.head is not None
    return Run(bucket.store, bucket.header).plan(bucket.head.version)


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

    sizes = dict(zip(payloads, history.read_many(size, payloads), strict=True))
    over = {payload.key for _, payload in payloads_over(plan)}

    def advice(keys: list[str]) -> str:
        return _COMPACT if over.issuperset(keys) else _NEW_ANCHOR

    missing = [payload.key for payload, found in sizes.items() if found is None]
    wrong = [payload for payload, found in sizes.items() if found not in {None, payload.size}]
    if missing:
        found = f"{len(missing)} of {len(payloads)} payloads are missing, such as {missing[0]}"
        yield bucket.finding("payload-missing", found, advice(missing))
    if wrong:
        first = wrong[0]
        found = (
            f"{len(wrong)} of {len(payloads)} payloads have other sizes than their manifests say, such as "
            f"{first.key}: expected {first.size:,} bytes, found {sizes[first]:,}"
        )
        yield bucket.finding("payload-size", found, advice([each.key for each in wrong]))
    if not missing and not wrong:
        yield bucket.finding(
            "payloads",
            f"its {len(payloads)} payloads are all there in their sizes; patchstore verify checks their bits",
        )


RUN_CHECKS: tuple[Check[Bucket], ...] = (
    Check(name="the run", look=_read, needs=("the answer",)),
    Check(name="the chain of versions", look=_lineage, needs=("the run",)),
    Check(name="payloads", look=_payloads, needs=("the chain of versions",)),
)
