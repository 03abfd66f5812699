"""Every error that patchstore raises on purpose, grouped by what a handler does with it.

A class says how to handle an error; `kind` is a stable word for logs, JSON and tests, and never changes
once released. A message says where it happened, what was expected and found, and what to do.
`docs/errors.md` lists the kinds.
"""

from typing import ClassVar


class PatchstoreError(Exception):
    """Base of the tree; never raised itself."""

    kind: ClassVar[str] = "error"


# The result of a request to a store, or that there was none.


class StoreError(PatchstoreError):
    """Base of the failures of a correct request to a store; never raised itself."""

    kind = "store"


class StoreUnavailable(StoreError):
    """The store did not answer, or not in time; whether a write happened is unknown. Retry."""

    kind = "store-unavailable"


class NotFound(StoreError):
    """No object has this key."""

    kind = "not-found"


class AlreadyExists(StoreError):
    """A create-only put found the key taken; what is stored was left as it is."""

    kind = "already-exists"


class VersionNotFound(NotFound):
    """The store has no such version."""

    kind = "version-not-found"


class VersionRetired(NotFound):
    """The version was given up by `patchstore prune`; its manifest is there, but not all of its payloads."""

    kind = "version-retired"


# Retry: a server or this host could not do it now.


class ServerUnavailable(PatchstoreError):
    """An inference server could not be reached, or refused a call for a reason without a kind of its own."""

    kind = "server-unavailable"


class EnginesDiffer(ServerUnavailable):
    """A data-parallel engine of a server does not answer as the first one did."""

    kind = "engines-differ"


class OtherServer(ServerUnavailable):
    """Another server answers at an address than before: it was restarted, or the address has several."""

    kind = "other-server"


class StaleCaches(ServerUnavailable):
    """A server cannot forget what older weights computed. It generates nothing, or was not updated."""

    kind = "stale-caches"


class RankLost(ServerUnavailable):
    """A rank of a server ended or did not answer in time; no rank is updated before all are started again."""

    kind = "rank-lost"


class WaitTimeout(PatchstoreError, TimeoutError):
    """Servers did not reach a version in time; they may still."""

    kind = "wait-timeout"


class HostError(PatchstoreError):
    """This host refused: it is short of descriptors, memory or disk, or one of its folders cannot be used."""

    kind = "os"


class DeviceMemoryShort(HostError):
    """An update needs more of a GPU's memory than is free; nothing was written."""

    kind = "device-memory"


# Fix the call: the caller asked for something impossible.


class UsageError(PatchstoreError):
    """The caller's mistake, or a call that is impossible in this state; nothing was written because of it."""

    kind = "usage"


class UnsupportedStore(UsageError):
    """The store lacks a guarantee that versions need, above all an exclusive create."""

    kind = "unsupported-store"


class RunExists(UsageError):
    """The prefix already holds a run, and this is not a resumption of it."""

    kind = "run-exists"


class IsReplica(UsageError):
    """The place is a replica of another, which `patchstore replicate` alone writes to."""

    kind = "is-replica"


class ResumeMismatch(UsageError):
    """The trainer's weights are not those of the version to continue from."""

    kind = "resume-mismatch"


class SchemaMismatch(UsageError):
    """Names, shapes or dtypes differ from those the run was created with."""

    kind = "schema-mismatch"


# Do not trust: what is stored is not what was published.


class DataError(PatchstoreError):
    """Stored or received bytes are wrong; nothing of them was applied."""

    kind = "data"


class CorruptObject(DataError):
    """An object's bytes do not match its digest, or its structure breaks the format's rules."""

    kind = "corrupt-object"


class UnsupportedFormat(DataError):
    """The object is of a format version or encoding that this release does not know."""

    kind = "unsupported-format"


class StateMismatch(DataError):
    """Rebuilt weights do not have the state digest that their manifest records."""

    kind = "state-mismatch"


class Unsigned(DataError):
    """A version has no signature by a required key; nothing of it was used."""

    kind = "unsigned"


class WrongSignature(DataError):
    """A version's signature is invalid, or signs something else; nothing of the version was used."""

    kind = "wrong-signature"


class RollbackRefused(DataError):
    """A signed version is older than one that was used before; it was not used."""

    kind = "rollback"


# Stop: another process uses, or used, the same run or server.


class VersionConflict(PatchstoreError):
    """Another publisher took the next version; this one is fenced and must not go on."""

    kind = "version-conflict"


class RunLost(VersionConflict):
    """The store no longer has the run or version that this publisher continues; it must not go on."""

    kind = "run-lost"


class StoreReplaced(PatchstoreError):
    """The store no longer holds what was read from it: another run is there, or versions are gone."""

    kind = "store-replaced"


class OtherRun(PatchstoreError):
    """A server serves another run than the caller means, so equal numbers are other weights."""

    kind = "other-run"


class DriverConflict(PatchstoreError):
    """Another process than this driver changed the version that a server serves."""

    kind = "driver-conflict"


class WrongParent(PatchstoreError):
    """No chain of payloads leads from one version to another: a parent is missing, or is another one."""

    kind = "wrong-parent"


class PublishFailed(PatchstoreError):
    """An earlier publication was not stored; the next one will be an anchor, so no change is lost."""

    kind = "publish-failed"


class RankFailed(PublishFailed):
    """A rank of a publisher failed, or was not heard of in time, so no rank published."""

    kind = "rank-failed"

    def __init__(self, message: str, ranks: "tuple[int, ...]" = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The global ranks that failed."""


class ConsumerFailed(PatchstoreError):
    """A command or a server did not accept a version that it was told of; it is told again."""

    kind = "consumer-failed"


class LoadFailed(PatchstoreError):
    """vLLM's loader of a model failed; the weights were restored, unless `HalfApplied` is reported too."""

    kind = "load-failed"


class HalfApplied(PatchstoreError):
    """A model holds part of a version because undoing a failed update failed too; load an anchor."""

    kind = "half-applied"


class InternalError(PatchstoreError):
    """A step failed in a way that the code does not expect; the log has the traceback."""

    kind = "internal"


def of_kind(kind: str) -> type[PatchstoreError] | None:
    """Return the class of a kind, such as another process told; None if this release has no such kind."""
    return _OF_KIND.get(kind)


_OF_KIND = {
    each.kind: each
    for each in list(vars().values())
    if isinstance(each, type) and issubclass(each, PatchstoreError) and each is not PatchstoreError
}
