"""On the user's machine: the task classes, and the job that they are registered as."""

# First: at the end of its own import it loads the task classes, whichever module of these is asked for.
import flytekit  # noqa: F401
