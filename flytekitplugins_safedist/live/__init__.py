"""What a run shows of itself while it goes on: metrics, and how fast its steps end."""
