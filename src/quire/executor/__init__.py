"""Runs steps on all ranks of a model: starts the workers and hands them batches."""
