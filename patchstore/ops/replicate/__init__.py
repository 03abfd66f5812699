"""Keep a bucket in another place equal to the one that the trainer writes: `patchstore replicate`."""
