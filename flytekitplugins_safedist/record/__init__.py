"""What happened in a run: events of ranks and nodes, one record of the job, and the page that shows it."""
