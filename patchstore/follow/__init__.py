"""Drive vLLM servers, and keep them at the newest version."""
