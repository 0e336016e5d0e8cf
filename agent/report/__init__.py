"""The report command and the scheduled report job: from the store to a file. I/O edge."""
