"""The workload that a size was computed for, and tests of whether it changed."""
