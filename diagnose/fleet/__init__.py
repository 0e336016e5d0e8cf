"""Causes across replicas: what no single target can show. Pure."""
