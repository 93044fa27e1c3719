"""``safedist``: see a job before it is registered, examine a machine, move from Flyte's own plugins."""
