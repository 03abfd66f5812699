"""A training run on one side, a real vLLM server on the other, a bucket in between.

`python -m examples.demo` trains a small model, publishes every step, keeps a server at the newest, and
verifies the weights of the server. Nothing is downloaded.
"""
