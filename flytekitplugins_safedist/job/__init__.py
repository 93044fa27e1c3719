"""One node's part of a job: rendezvous, rounds of ranks, the root cause and the verdict, the order of leaving."""
