"""What each engine computes: tracing, graph passes and precision."""
