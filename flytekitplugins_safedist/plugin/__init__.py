"""On the user's machine: the task classes, and the job that they are registered as."""
