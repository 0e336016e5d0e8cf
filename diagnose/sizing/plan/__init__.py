"""The guide's thirteen steps for a workload profile. Pure."""
