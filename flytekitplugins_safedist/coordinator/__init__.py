"""The whole job as values: what its nodes are (statuses), what they should be (wants), what it has come to (books)."""
