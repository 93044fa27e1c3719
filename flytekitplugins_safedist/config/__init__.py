"""What the user writes about a job, what follows from it, and everything that can be wrong with it."""
