"""What it means and what to do: causes with evidence, symptoms, the monitor of a target."""
