"""The decision core: no clock, no I/O, no async, no torch, no randomness, no environment."""
