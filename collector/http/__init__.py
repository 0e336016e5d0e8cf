"""HTTP scrapes of a metrics page: addresses, access, timeouts, error messages."""
