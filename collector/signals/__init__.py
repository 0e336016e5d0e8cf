"""The signal catalogue: expressions that are evaluated on windows and compiled to PromQL."""
