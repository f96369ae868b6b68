"""The digital twin: the decision core on a simulated clock. Not built yet; ARCHITECTURE.md says what comes here."""
