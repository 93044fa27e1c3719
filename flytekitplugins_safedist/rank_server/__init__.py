"""A fresh interpreter beside each agent: imports the libraries once, forks the ranks, reaps them. Runs no user code."""
