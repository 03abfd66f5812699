"""S3's way to store a large object: numbered parts, which become an object when completed.

S3 takes parts of 5 MiB to 5 GiB and at most 10,000 of them, and a stream does not say its size
beforehand. So parts stay `PART_BYTES` up to the 5,000th (40 GiB, more than any shard of a model),
which also suits servers that want all parts equal, and grow after that to a total of 6 TiB.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk

_UNIFORM_PARTS = 5_000
_GROW_EVERY = 16


def part_bytes(number: int) -> int:
    """Size of a part in bytes; `number` counts from 1.

    >>> [part_bytes(number) // PART_BYTES for number in (1, 5_000, 5_017, 10_000)]
    [1, 1, 2, 313]
    """
    return PART_BYTES * (1 + max(0, number - 1 - _UNIFORM_PARTS) // _GROW_EVERY)


def in_parts(chunks: Iterable[Chunk]) -> Iterator[bytearray]:
    """Cut chunks of any sizes into parts: all full but the last, and at least one, maybe empty."""
    number, part = 1, bytearray()
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            # A full part waits for a further byte, so that an empty one never follows it.
            if len(part) == part_bytes(number):
                yield part
                number, part = number + 1, bytearray()
            room = part_bytes(number) - len(part)
            part += rest[:room]
            rest = rest[room:]
    yield part


def send_parts(call: Callable[..., Any], bucket: str, key: str, parts: Iterable[bytearray]) -> None:
    """Store an object from parts, several at once; it becomes visible at the end or not at all.

    Holds at most `NUM_PARTS * PART_BYTES` bytes, or two parts where those are larger. `call` is
    as s3fs's `call_s3`; its errors and those of `parts` pass through. After an error the upload has
    been aborted, because S3 keeps, and charges for, the parts of an unfinished upload; if the abort
    failed too, the error has a note that says so.
    """
    upload = {"Bucket": bucket, "Key": key}
    upload["UploadId"] = call("create_multipart_upload", **upload)["UploadId"]
    sending: deque[tuple[int, Future[Any]]] = deque()
    sent: list[dict[str, Any]] = []
    with ThreadPoolExecutor(NUM_PARTS, thread_name_prefix="patchstore-upload") as pool:
        try:
            for number, part in enumerate(parts, 1):
                # Bytes and not a file, which a retry would send from where the first attempt left it.
                future = pool.submit(call, "upload_part", **upload, PartNumber=number, Body=part)
                sending.append((len(part), future))
                # The next part is collected while these travel, so it counts as well.
                while sum(size for size, _ in sending) + part_bytes(number + 1) > NUM_PARTS * PART_BYTES:
                    sent.append(_sent(len(sent) + 1, sending.popleft()[1]))
                    if not sending:
                        break
            while sending:
                sent.append(_sent(len(sent) + 1, sending.popleft()[1]))
            call("complete_multipart_upload", **upload, MultipartUpload={"Parts": sent})
        except BaseException as exc:
            # A part that arrives after the abort would stay: first let those under way finish.
            for _, future in sending:
                future.cancel()
            wait([future for _, future in sending])
            try:
                call("abort_multipart_upload", **upload)
            except Exception as failure:  # noqa: BLE001 - of the two errors the first one matters
                exc.add_note(f"unfinished upload {upload['UploadId']} of {key} was not aborted: {failure}")
            raise


def _sent(number: int, future: Future[Any]) -> dict[str, Any]:
    return {"PartNumber": number, "ETag": future.result()["ETag"]}
