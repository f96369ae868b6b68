"""The digital twin: the decision core on a simulated clock, with step times from a cost model."""
