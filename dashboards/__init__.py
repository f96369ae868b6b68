"""Web dashboards over event logs, calibrations and plans. Not built yet; ARCHITECTURE.md says what comes here."""
