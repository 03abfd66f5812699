"""Frameworks for training, connected to a store: one module for each. Import them by name."""
