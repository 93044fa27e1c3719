"""In the pod, around the task: the code archive becomes code in a directory, and a verdict goes to the store."""
