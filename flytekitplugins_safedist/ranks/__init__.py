"""One node's ranks: started from one forkserver, each with its scratch, watched, ended, and what they left behind."""
