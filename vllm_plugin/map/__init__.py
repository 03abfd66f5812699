"""Where a model's loader puts each element of a checkpoint."""
