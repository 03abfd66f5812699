"""Examples that run: `trainer` is the README's, `demo` is what `make demo` shows."""
