"""Workloads: what arrives when, how long it is, and what follows it. No clock and no simulator here: times are numbers."""
