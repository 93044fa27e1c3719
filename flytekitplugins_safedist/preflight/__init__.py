"""Is a machine, or are the machines of a job, fit for it: looked at before anything runs there."""
