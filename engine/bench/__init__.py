"""The load generator: requests to any OpenAI-compatible server on a schedule, measured with the definitions of engine.core.metrics."""
