"""What vLLM loads in each of its processes, through the entry point in the group `vllm.general_plugins`."""

from vllm_plugin import prefixes, replies


def load() -> None:
    """Keep replies in step with calls, and let prefixes be told apart. Calling it again changes nothing."""
    replies.keep_in_step()
    prefixes.tell_apart()
