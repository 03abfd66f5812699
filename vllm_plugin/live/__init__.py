"""The weights that are served: mapped to a run, read, proved and written in place."""
