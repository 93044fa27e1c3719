"""Flyte as a task meets it: its context, its stores and their errors, uploads, limits of outputs."""
