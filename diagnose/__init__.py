"""Turns metrics into verdicts and advice: causes with evidence, symptoms, one monitor per
target."""
