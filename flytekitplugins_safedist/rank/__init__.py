"""What runs in a rank: its identity, the user's code, inputs and outputs, how it ended."""
