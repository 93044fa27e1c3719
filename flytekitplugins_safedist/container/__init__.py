"""In the pod, before and around the task: the entrypoint, staging of the code, the command."""
