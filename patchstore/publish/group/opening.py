"""Open a run with many ranks: agree on who owns what, then create the run or continue it."""

import base64
import json
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from patchstore.errors import NotFound, PatchstoreError, SchemaMismatch, UsageError
from patchstore.format import history, layout
from patchstore.format.anchoring import Since
from patchstore.format.records import Part, Schema, StoreHeader, TensorSpec
from patchstore.format.state_sums import Sums
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.committer import Committer
from patchstore.publish.group import ownership
from patchstore.publish.group.channel import Channel, Message
from patchstore.publish.group.ownership import File, Plan, Share
from patchstore.publish.group.report import add, by_name
from patchstore.publish.sources.dtypes import Held, Known
from patchstore.stores.base import Store
from patchstore.stores.probe import check_create_only

if TYPE_CHECKING:
    from patchstore.publish.opening import Settings


class Agreed(NamedTuple):
    """What ranks agreed on before anything is created."""

    share: Share
    plan: Plan | None
    """On the leader alone, as the schema."""
    schema: Schema | None
    needs_sums: bool
    """Whether to digest what this rank owns: the run is continued from a version that has these weights."""
    secret: bytes
    """Known to those who can read the store while the publisher opens; the channel trusts it."""


class Run(NamedTuple):
    """A run that is open."""

    header: StoreHeader
    is_stored: bool
    """Whether the version to build on has these weights."""
    since_anchor: Since
    committer: Committer | None
    """On the leader alone."""


def share_dtypes(channel: Channel, look: Callable[[], Held], base: BaseCheckpoint) -> Known:
    """Tell all ranks what decides dtypes: of the base checkpoint, which the leader reads, and of all ranks.

    Args:
        look: returns what this rank has.

    Raises:
        RankFailed, and what `look` raises.
    """

    def conclude(reports: list[Message]) -> Message:
        return {
            "known": _packed(asdict(Known.of(base, [Held(*_unpacked(each["held"])) for each in reports])))
        }

    told = channel.round("say what they have", lambda: {"held": _packed(look())}, conclude)
    return Known(**_unpacked(told["known"]))


def _packed(value: Any) -> str:
    """Return JSON in few bytes: there are tens of thousands of names, and hundreds of ranks."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def agree(
    channel: Channel,
    store: Store,
    describe: Callable[[], tuple[Sequence[Part], Mapping[str, str]]],
    settings: "Settings",
    check_schema: Callable[[Schema], None],
) -> Agreed:
    """Agree on who owns what, and on a secret.

    Args:
        describe: returns what this rank has, and which names are tied to others.
        settings: must be equal on all ranks.
        check_schema: raises if the schema cannot be published; called on the leader.

    Raises:
        SchemaMismatch, UsageError, RankFailed: the same on all ranks.
    """
    plan: Plan | None = None
    schema: Schema | None = None

    parts: Sequence[Part] = ()
    # Not told through the channel: whoever writes there could name an object that it knows.
    probe, secret = f"{layout.PROBES}ranks-{channel.session}", b""

    def say() -> Message:
        nonlocal parts
        parts, tied = describe()
        listed = [(part.spec.name, part.spec.dtype, part.spec.shape, part.start, part.size) for part in parts]
        return {"parts": listed, "tied": dict(tied), "settings": settings.told()}

    def conclude(reports: list[Message]) -> list[Message]:
        nonlocal plan, schema
        _check_equal(channel, [report["settings"] for report in reports])
        all_tied = _united(channel, [report["tied"] for report in reports])
        offers = [[_part(*each) for each in report["parts"]] for report in reports]
        # A rank whose parts of two tied tensors are empty does not see that they are tied.
        given = [
            [(number, part) for number, part in enumerate(its) if part.spec.name not in all_tied]
            for its in offers
        ]
        chosen = ownership.own([[part for _, part in its] for its in given])
        owned = [[its[number][1] for number in numbers] for its, numbers in zip(given, chosen, strict=True)]
        specs = {part.spec.name: part.spec for its in owned for part in its}
        schema = Schema(tensors=tuple(specs[name] for name in sorted(specs)), tied=all_tied)
        if missing := sorted(set(all_tied.values()) - specs.keys()):
            raise SchemaMismatch(f"{missing[0]!r} is tied to another name, but no rank has it")
        check_schema(schema)
        # A read first: if the store does not answer, it fails at once, while the probe would try repeatedly.
        begun = history.read_header(store)
        check_create_only(store)
        plan = ownership.plan(schema, owned, settings.max_shard_bytes)
        store.put(probe, secrets.token_hex().encode())
        needs_sums = begun is not None and settings.resume.needs_weights
        writers = plan.writers()
        return [
            {
                "own": [its[number][0] for number in numbers],
                "writers": {part.spec.name: writers[part.spec.name] for part in parts},
                "files": [
                    (name, [(spec.name, spec.dtype, spec.shape) for spec in file.specs])
                    for name, file in plan.files
                    if file.writer == place
                ],
                "needs_sums": needs_sums,
            }
            for place, (its, numbers, parts) in enumerate(zip(given, chosen, owned, strict=True))
        ]

    def look() -> Message:
        nonlocal secret
        try:
            secret = store.get(probe)
        except NotFound as exc:
            raise UsageError(
                f"{store.url} is another place on {channel.name(channel.rank)} than on "
                f"{channel.name(channel.ranks[0])}, which stored {probe} there; give a URL or a path that "
                "all ranks share"
            ) from exc
        return {}

    try:
        told = channel.round("open a publisher", say, conclude)
        channel.round("look for each other in the store", look, lambda _: {})
    finally:
        if channel.leads:
            # A few bytes left behind are no harm, and a publisher need not have the right to delete.
            with suppress(PatchstoreError):
                store.delete(probe)
    channel.trust(secret)
    share = Share(
        tuple(parts[number] for number in told["own"]),
        told["writers"],
        tuple(
            (
                name,
                File(
                    channel.index,
                    tuple(TensorSpec(name=n, dtype=d, shape=tuple(shape)) for n, d, shape in specs),
                ),
            )
            for name, specs in told["files"]
        ),
    )
    return Agreed(share, plan, schema, told["needs_sums"], secret)


def open_run(
    channel: Channel,
    store: Store,
    agreed: Agreed,
    prepare: Callable[[], Mapping[str, Sums]],
    create: Callable[[Schema, dict[str, Sums]], tuple[Committer, bool, Since]],
) -> Run:
    """Create or continue the run.

    Args:
        prepare: makes this rank ready, and returns the digest sums of what it owns, by key, if needed.
        create: opens the run on the leader, given the sums of all tensors; returns the committer, whether the
            version to build on has these weights, and what was published since the newest anchor.

    Raises:
        As `Publisher`, and RankFailed; the same on all ranks.
    """
    committer: Committer | None = None

    def ready() -> Message:
        return {"sums": by_name(agreed.share.parts, prepare())}

    def conclude(reports: list[Message]) -> Message:
        nonlocal committer
        assert agreed.schema is not None
        totals: dict[str, Sums] = {}
        for report in reports:
            add(totals, report["sums"])
        committer, is_stored, since_anchor = create(agreed.schema, totals)
        return {
            "run_id": committer.header.run_id,
            "is_stored": is_stored,
            "since_anchor": asdict(since_anchor),
        }

    told = channel.round("open a run", ready, conclude)
    header = committer.header if committer is not None else history.read_header(store)
    if header is None or header.run_id != told["run_id"]:
        raise UsageError(f"{store.url} does not hold the run that the other ranks opened")
    return Run(header, told["is_stored"], Since(**told["since_anchor"]), committer)


def _part(name: str, dtype: str, *sides: Sequence[int]) -> Part:
    """Return a part that a rank told of: its tensor's shape, where it begins, and its own shape."""
    shape, start, size = map(tuple, sides)
    return Part(TensorSpec(name=name, dtype=dtype, shape=shape), start, size)


def _check_equal(channel: Channel, each: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError where ranks were given other arguments than the leader."""
    for rank, settings in zip(channel.ranks, each, strict=True):
        for name, value in settings.items():
            if value != each[0].get(name):
                raise UsageError(
                    f"ranks must open a publisher with the same arguments, but {name} is "
                    f"{each[0].get(name)!r} on {channel.name(channel.ranks[0])} and {value!r} on "
                    f"{channel.name(rank)}"
                )


def _united(channel: Channel, each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the ties of all ranks.

    Raises:
        SchemaMismatch: ranks keep a tied tensor under other names.
    """
    found: dict[str, str] = {}
    for rank, tied in zip(channel.ranks, each, strict=True):
        for alias, name in tied.items():
            if found.setdefault(alias, name) != name or name in found or alias in found.values():
                raise SchemaMismatch(
                    f"ranks differ in tied tensors: on {channel.name(rank)}, {alias!r} is {name!r}; on "
                    f"others ties are {found}"
                )
    return found
