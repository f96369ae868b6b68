"""Scheduler and runner joined without processes or clocks: what the actors do, in a plain loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.core.cache_config import CacheConfig
from engine.core.events import Admitted, Event, Finished, Preempted, TokensEmitted
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.specs import DSparkSpec, V41Spec
from engine.model.base import Model
from engine.model.grammar_state import GrammarSource
from engine.model.load import RandomWeights
from engine.model.runner import Runner

FIXTURES = Path(__file__).parents[1] / "fixtures"


def small_v41_spec(name: str = "v41_ragged_greedy") -> V41Spec:
    """A fixture's dimensions with a DSpark draft added (the fixtures have none)."""
    from engine.core.model_config import model_spec

    spec = model_spec(json.loads((FIXTURES / name / "config.json").read_text()), name)
    assert isinstance(spec, V41Spec)
    draft = DSparkSpec(2, 5, (spec.num_layers - 2, spec.num_layers - 1), 16, 7, 4, 2)
    return msgspec.structs.replace(spec, dspark=draft, eos_token_ids=())


def random_v41(spec: V41Spec, seed: int = 0) -> Model:
    from engine.model.v41 import V41Model

    assert spec.engram is not None
    token_map = torch.arange(spec.vocab_size) % spec.engram.num_classes
    weights = RandomWeights(spec, seed)
    return V41Model(spec, weights, dtype=torch.float32, device=torch.device("cpu"), cache_rounding=False, token_map=token_map)


class Engine:
    """Runs requests to their end, one plan at a time or overlapped, keeping the events."""

    def __init__(
        self, model: Model, *, overlap: bool = True, check: bool = True, grammars: GrammarSource | None = None, **options: Any
    ) -> None:
        cache_fields = set(CacheConfig.__struct_fields__)
        cache_values: dict[str, Any] = {
            "num_blocks": 64, "block_size": 16, "max_running": 8, "max_batched_tokens": 64, "context_length": 256,
            "max_draft_tokens": options.get("draft_tokens", 0), "num_tails": 16 if model.spec.has_sequence_state else 0,
        }  # fmt: skip
        cache_values |= {key: options.pop(key) for key in list(options) if key in cache_fields}
        cache = CacheConfig(**cache_values)
        self.scheduler = Scheduler(SchedulerConfig(cache=cache, has_sequence_state=model.spec.has_sequence_state, **options))
        self.runner = Runner(model, cache, grammars=grammars)
        self.overlap = overlap
        self.check = check
        self.events: list[Event] = []
        self.plans: list[StepPlan] = []
        self._registered: set[int] = set()
        self._requests: dict[int, tuple[Request, int]] = {}
        self._next_id = 0

    def submit(self, prompt: Sequence[int], *, n: int = 1, **params: Any) -> list[int]:
        ids = tuple(range(self._next_id, self._next_id + n))
        self._next_id += n
        seed = params.pop("seed", 11)
        params.setdefault("ignore_eos", True)
        salt = params.pop("cache_salt", None)
        priority = params.pop("priority", 0)
        request = Request(
            id=ids[0], prompt=tuple(prompt), params=SamplingParams(**params), sample_ids=ids, cache_salt=salt, priority=priority
        )
        for offset, sample in enumerate(ids):
            self._requests[sample] = (request, seed + offset)
        self.events += self.scheduler.submit(request, 0.0)
        return list(ids)

    def step(self, waiting: list[tuple[StepPlan, StepResult]]) -> bool:
        """Plan and execute ahead as far as the core allows, then commit the oldest; false when nothing was left to do."""
        while len(waiting) < (2 if self.overlap else 1):
            plan = self.scheduler.plan(0.0)
            if plan is None:
                break
            self.plans.append(plan)
            for start in plan.ranks[0].starts:
                if start.request not in self._registered:
                    self._registered.add(start.request)
                    request, seed = self._requests[start.request]
                    self.runner.register(start.request, request.prompt, request.params, seed)
            waiting.append((plan, StepResult(plan.step, (self.runner.execute(plan.step, plan.ranks[0]),))))
        if not waiting:
            return False
        self.events += self.scheduler.commit(*waiting.pop(0), 0.0)
        if self.check:
            self.scheduler.check()
        return True

    def run(self, max_steps: int = 2000) -> dict[int, list[int]]:
        """Tokens of every request submitted so far."""
        waiting: list[tuple[StepPlan, StepResult]] = []
        for _ in range(max_steps):
            if not self.step(waiting):
                break
        else:
            raise AssertionError(f"not finished after {max_steps} steps")
        tokens: dict[int, list[int]] = {}
        for event in self.events:
            if isinstance(event, TokensEmitted):
                tokens.setdefault(event.request, []).extend(event.tokens)
        return tokens

    def generate(self, prompt: Sequence[int], **params: Any) -> list[int]:
        request = self.submit(prompt, **params)[0]
        return self.run()[request]

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def cached_tokens(self, request: int) -> int:
        return int(next(event.num_cached_tokens for event in self.of_kind(Admitted) if event.request == request))


__all__ = ["Admitted", "Engine", "Finished", "Preempted", "random_v41", "small_v41_spec"]
