"""What `live` does name by name, for all names at once, in kernels."""
