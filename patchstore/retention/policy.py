"""The policy of a run: which of its versions are kept."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from patchstore.errors import UsageError
from patchstore.format.json_fields import time_of
from patchstore.format.records import Manifest
from patchstore.format.times import CLOCK_MARGIN

_MAX_DAYS = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which versions to keep: those that any of the rules keeps, and always the newest one.

    Raises:
        UsageError: no rule is given, or one is impossible.
    """

    keep_last: int | None = None
    """The newest so many versions."""
    keep_every: int | None = None
    """Versions whose number is a multiple of this."""
    keep_days: float | None = None
    """Versions that were created in the last so many days, and two hours more, as clocks may be wrong."""
    keep_tags: bool = True
    """Versions that have a tag. With False a tagged version that no other rule keeps is an error; it is never
    retired."""

    def __post_init__(self) -> None:
        # It imports numpy, which commands that only look at a bucket do without.
        from patchstore.support.arguments import whole_number

        if self.keep_last is None and self.keep_every is None and self.keep_days is None:
            raise UsageError(
                "say which versions to keep: keep_last, keep_every or keep_days. With none of them all but "
                "the newest would be retired"
            )
        for name in ("keep_last", "keep_every"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least=1)
        days = self.keep_days
        if days is not None and (type(days) not in (int, float) or not 0 <= days <= _MAX_DAYS):
            raise UsageError(f"keep_days must be a number of days from 0 to {_MAX_DAYS}, not {days!r:.100}")
        if type(self.keep_tags) is not bool:
            raise UsageError(f"keep_tags must be True or False, not {self.keep_tags!r:.100}")

    def keeps(self, version: Manifest, newest: Manifest, now: datetime) -> bool:
        """Whether a rule other than `keep_tags` keeps a version."""
        if version.version == newest.version:
            return True
        if self.keep_last is not None and version.version > newest.version - self.keep_last:
            return True
        if self.keep_every is not None and version.version % self.keep_every == 0:
            return True
        if self.keep_days is None:
            return False
        return time_of(version.created_at) + timedelta(days=self.keep_days) + CLOCK_MARGIN >= now
