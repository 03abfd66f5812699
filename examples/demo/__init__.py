"""A training run on one side, a real vLLM server on the other, a bucket in between.

`python -m examples.demo` trains a small model, publishes every step, has a server follow, and
proves what the server holds. Nothing is downloaded.
"""
