"""One GET a scrape of an HTTP metrics page: addresses, access, deadlines, failures in words."""
