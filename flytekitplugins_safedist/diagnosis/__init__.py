"""Why does a job not move: what its ranks do right now, from outside, and what that says."""
