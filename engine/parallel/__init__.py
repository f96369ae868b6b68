"""Several processes as one replica: process groups, collectives, and what is spread over them (experts, Engram tables)."""
