"""An MPIJob: its launcher starts one agent in each worker pod, and leaves when they have ended."""
