"""Calibration: from kernel traces to a cost model. Not built yet; ARCHITECTURE.md says what comes here."""
