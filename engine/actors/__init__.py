"""The trio actors: supervisor, gateway, scheduler, worker, cache manager."""
