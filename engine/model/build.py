"""From a worker's configuration to a Runner: threads, device, weights, cache."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.layout import parse_layout
from engine.core.sharding import EngramPlacement, RankPlace
from engine.grammar_compiler import GrammarCompiler
from engine.model.files import ModelFiles, read_model_files
from engine.model.grammar_state import GrammarSource
from engine.model.load import LoadFormat, LoadReport, load_model
from engine.model.runner import Runner
from engine.parallel.experts import Routing
from engine.parallel.groups import ParallelGroups
from engine.tokenizer import Tokenizer

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
    @property
    def layout(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def rendezvous(self) -> str | None: ...
    @property
    def collective_timeout_s(self) -> float: ...
    @property
    def engram(self) -> EngramPlacement: ...
    @property
    def redundant_experts(self) -> int: ...
    @property
    def draft_redundant_experts(self) -> int: ...
    @property
    def forced_acceptance(self) -> float | None: ...
    @property
    def forced_routing(self) -> Routing: ...


def build_runner(config: RunnerConfig, report: LoadReport | None = None) -> Runner:
    """Load the model on its device and allocate its cache. Raises ConfigError for what cannot work.

    ``report`` is told of the progress: parameters read, parameters there are.
    """
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.dtype!r}; allowed: {', '.join(DTYPES)}")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = torch.device(config.device)
    place = RankPlace(
        layout=parse_layout(config.layout).decode.unit,
        rank=config.rank,
        engram=config.engram,
        redundant_experts=config.redundant_experts,
        draft_redundant_experts=config.draft_redundant_experts,
    )
    groups = _groups(config, place, device)
    files = read_model_files(config.model)
    grammars = _grammars(files)  # begins to read the tokens while the weights are read
    loaded = load_model(
        files,
        dtype=DTYPES[config.dtype],
        device=device,
        cache_rounding=config.cache_rounding,
        load_format=config.load_format,
        random_seed=config.random_seed,
        report=report,
        place=place,
        groups=groups,
        routing=config.forced_routing,
    )
    return Runner(
        loaded.model,
        config.cache,
        grammars=grammars,
        time_components=config.time_components,
        forced_acceptance=config.forced_acceptance,
    )


def _groups(config: RunnerConfig, place: RankPlace, device: torch.device) -> ParallelGroups | None:
    """Meet the other ranks, where there are any. Raises CollectiveError where they do not come."""
    if place.num_ranks == 1:
        return None
    if config.rendezvous is None:
        raise ConfigError(f"layout {place.layout} has {place.num_ranks} ranks, and no rendezvous is named")
    return ParallelGroups(place, rendezvous=config.rendezvous, device=device, timeout_s=config.collective_timeout_s)


def _grammars(files: ModelFiles) -> GrammarSource | None:
    data, spec = files.tokenizer_json, files.spec
    if data is None or not spec.eos_token_ids:
        return None
    return GrammarSource(GrammarCompiler(partial(Tokenizer, data), spec.vocab_size, spec.eos_token_ids))
