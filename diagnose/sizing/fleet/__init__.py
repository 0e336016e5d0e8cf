"""How many, how ready and at what price: fleet, limits, tiers, cost. Pure."""
