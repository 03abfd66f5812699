"""What of a run is kept: policies, retirement of versions, leases of readers, and deletion of payloads."""

from patchstore.format.kept import delete_tag, tag
from patchstore.retention.collect import Collection, collect
from patchstore.retention.lease import Lease
from patchstore.retention.policy import Retention
from patchstore.retention.retire import Retirement, retire

__all__ = [
    "Collection",
    "Lease",
    "Retention",
    "Retirement",
    "collect",
    "delete_tag",
    "retire",
    "tag",
]
