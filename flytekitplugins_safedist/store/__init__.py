"""Object stores, for every process: what their errors say, questions that are bounded and tried again, transfers."""
