"""Sources of GPU metrics: DCGM exporter and NVML."""
