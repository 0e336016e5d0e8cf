"""Incidents of vLLM's issue threads and of operation, as pages built from the stated figures."""
