"""Sizing: memory, speed, operating point, fleet and cost. Pure functions of numbers."""
