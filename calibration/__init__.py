"""Calibration: from kernel traces to measured tables, and from those to a cost model (to come; ARCHITECTURE.md)."""
