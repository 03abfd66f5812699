"""A Hugging Face Hub of one's own: buckets, where their contents lie, and the S3 gateway.

    with Hub() as hub:
        hub.create_bucket("user/bucket")
        store = open_store("hf://buckets/user/bucket/run", **hub.options("user"))

The real huggingface_hub, hf-xet and s3fs talk to it, also from several processes. It imitates what
these clients see of the service, and can be told to fail: see `Hub.fault`, `Hub.lose`, `Hub.refuse`
and `Hub.corrupt`. For tests, the demo and benchmarks; `python -m tests.support.hub` runs one by itself.
"""

from tests.support.hub.server import Hub

__all__ = ["Hub"]
