"""One node's ranks as its agent sees them: started, watched, ended, and what they leave behind."""
