"""GPU and host telemetry: a sampler process, the sources it reads, and the launcher that keeps it alive."""
