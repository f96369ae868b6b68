"""DeepSeek-V4.1: the paged forward, its cache and the DSpark draft."""

from engine.model.v41.cache import V41Cache
from engine.model.v41.hashing import build_token_map
from engine.model.v41.model import V41Model

__all__ = ["V41Cache", "V41Model", "build_token_map"]
