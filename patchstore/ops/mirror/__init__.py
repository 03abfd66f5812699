"""Keep a local checkpoint folder at a version, and tell others of it: `patchstore mirror`."""
