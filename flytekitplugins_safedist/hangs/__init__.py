"""Why does a job not move: what its ranks do right now, from outside, and what that says.

An agent has a :class:`.watch.Watch` over its node's ranks: ``look`` says which of their waits last for too long, and
``snapshots`` what they do. :func:`.judge.judge` makes a :class:`.judge.Hang` of the snapshots of all nodes; it is pure.
"""
