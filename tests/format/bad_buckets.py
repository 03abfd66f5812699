"""What can be wrong with a bucket, and the kind of error that each must give.

Each case is a small change to a golden bucket; see `bucket_edits`.
"""

from tests.format import bad_context, bad_payloads, bad_records
from tests.format.bucket_edits import Bad

CASES: list[Bad] = [*bad_payloads.CASES, *bad_records.CASES, *bad_context.CASES]
