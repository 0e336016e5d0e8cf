"""Fleet mode: a diagnosis of many replicas from a metrics system."""
