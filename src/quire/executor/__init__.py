"""One step on all ranks of a model: who runs the workers, and where."""
