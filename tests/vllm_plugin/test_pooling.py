"""A server of embeddings: which version they are of is not known, so none can be asked for."""

import httpx
import pytest
from server_process import MODEL_NAME

SERVER_ARGUMENTS = ("--runner", "pooling", "--convert", "embed")
WANTED = "patchstore_version"


@pytest.mark.parametrize(
    ("headers", "arguments"), [({"X-Patchstore-Version": "=0"}, {}), ({}, {WANTED: "=0"}), ({}, {WANTED: 0})]
)
def test_embeddings_of_a_version_are_refused_wherever_the_request_says_it(process, headers, arguments):
    asked = {"model": MODEL_NAME, "input": [5, 6, 7]}
    url = f"{process.url}/v1/embeddings"
    assert httpx.post(url, json=asked, timeout=120).raise_for_status().json()["data"]
    refused = httpx.post(url, json=asked | {"vllm_xargs": arguments}, headers=headers, timeout=120)
    assert (refused.status_code, "version" in refused.json()["error"]["message"]) == (400, True)
