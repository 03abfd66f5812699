"""What an error came of."""

from collections.abc import Iterator


def causes_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came of, the innermost last.

    An error that comes from another thread, as those of s3fs do, gets a new context where it is raised again:
    what the caller was handling. botocore keeps the cause of its errors beside them, too.
    """
    cause: BaseException | None = exc
    while cause is not None:
        yield cause
        kept = getattr(cause, "kwargs", None)
        inner = kept.get("error") if isinstance(kept, dict) else None
        cause = cause.__cause__ or (inner if isinstance(inner, BaseException) else cause.__context__)
