"""What becomes of an attempt, in the store: outputs, or one error."""
