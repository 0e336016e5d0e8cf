"""Rules as data, their states over time, and the KV memory-pressure cascade."""
