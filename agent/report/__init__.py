"""The report command and job: from the store to a file. I/O edge."""
