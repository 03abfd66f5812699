"""Where this checkout is."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Processes of benchmarks run here, so that they import this checkout."""
