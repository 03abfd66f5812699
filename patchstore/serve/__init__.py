"""Drivers for other programs: vLLM's server, and the loop that keeps one at the head."""
