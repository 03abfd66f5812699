"""The programs of a soak: a trainer, followers, a compactor and a collector, each of which may be killed."""
