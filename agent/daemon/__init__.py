"""The sidecar: cycles on a schedule, from targets to board and store."""
