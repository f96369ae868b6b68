"""From a worker's configuration to a Runner: threads, device, weights, cache."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.model.load import LoadFormat, LoadReport, load_model
from engine.model.runner import Runner

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RunnerConfig(Protocol):
    """What is needed of the actors' WorkerConfig; a Protocol because models know nothing of actors."""

    @property
    def model(self) -> str: ...
    @property
    def cache(self) -> CacheConfig: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def load_format(self) -> LoadFormat: ...
    @property
    def random_seed(self) -> int: ...
    @property
    def num_threads(self) -> int | None: ...
    @property
    def cache_rounding(self) -> bool: ...
    @property
    def time_components(self) -> bool: ...


def build_runner(config: RunnerConfig, report: LoadReport | None = None) -> Runner:
    """Load the model on its device and allocate its cache. Raises ConfigError for what cannot work.

    ``report`` is told of the progress: parameters read, parameters there are.
    """
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.dtype!r}; allowed: {', '.join(DTYPES)}")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(
        config.model,
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
        cache_rounding=config.cache_rounding,
        load_format=config.load_format,
        random_seed=config.random_seed,
        report=report,
    )
    return Runner(loaded.model, config.cache, time_components=config.time_components)
