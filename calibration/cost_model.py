"""Prices of steps from a calibration. The one composition rule for the twin, the shadow and ``predict``, whatever the layout:

    rank      the sum of its components, each its fitted rates over its terms
    step      scale x the slowest rank + the collectives, by kind, size and number + the host's gap between two forwards

Engram's rows travel beside the layers before the first that needs them: only what these do not cover is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from calibration.contention import HostMemory, gather_seconds, row_bytes, waited_seconds
from calibration.decode_steps import decode_steps
from calibration.expert_work import expert_shape
from calibration.features import Array, FeatureTable, table_of_plans, uniform_steps
from calibration.fit import column_names
from calibration.floors import LAUNCH, Messages, Resource, Term, messages, terms
from calibration.imbalance import BALANCED, ExpertBalance, ExpertLoads, expert_loads
from calibration.single_price import MAX_RANKS, SinglePrice
from engine.core.errors import DomainError
from engine.core.layout import Layout, parse_layout
from engine.core.plan import StepPlan
from engine.core.sharding import EngramPlacement, RankPlace
from engine.core.specs import COMPONENTS, ModelSpec, V41Spec
from engine.core.step_cost import ComponentPrice, Provenance, StepPrice
from engine.core.stretch import StretchPrice

# How much wider an interval is where the rank's own shape was never measured, and per factor of e outside the measured range.
SCALED_WIDENING = 1.5
EXTRAPOLATION_WIDENING = 1.0
RESOURCE_OF_COMPONENT: Mapping[str, Resource] = {
    **dict.fromkeys(("projection", "expert_gemm", "shared_expert", "dense_ffn", "lm_head", "draft", "mhc", "indexer", "other"), "compute"),
    **dict.fromkeys(("embed", "attention.window", "attention.sparse", "attention.full", "engram.fetch", "engram.gate"), "memory"),
}


class ComponentFit(msgspec.Struct, frozen=True):
    """Seconds of one component: coefficient x column, summed. ``held_out_*``: errors |measured / predicted - 1| of points not fitted."""

    columns: tuple[str, ...]
    coefficients: tuple[float, ...]
    held_out_median: float
    held_out_p90: float
    share: float  # of the time of the points measured


class RankFit(msgspec.Struct, frozen=True):
    """One shape of rank on a given share of the machine. ``low`` and ``high``: the measured range of each hull feature.

    ``has_collectives``: fitted on whole forwards, so that they are inside the components and no other layout can be told from it.
    """

    layout: str
    cores: int
    busy_neighbours: int
    components: dict[str, ComponentFit]
    low: dict[str, float]
    high: dict[str, float]
    num_points: int
    has_collectives: bool = False


class CollectiveFit(msgspec.Struct, frozen=True):
    """Seconds of one collective among ``num_ranks``, by the bytes a rank sends; between sizes straight in log-log, beyond them at the last
    rate."""

    num_ranks: int
    bytes_sent: tuple[float, ...]
    seconds: tuple[float, ...]


class StepFit(msgspec.Struct, frozen=True):
    """What whole steps of the engine showed beside the parts: factors on them, the host's gap, and the conformal factors (90 %)."""

    layout: str
    cores: int
    busy_neighbours: int
    compute_scale: float = 1.0
    collective_scale: float = 1.0
    gap_s: float = 0.0
    gap_per_request_s: float = 0.0
    gap_per_start_s: float = 0.0
    low_factor: float = 0.5
    high_factor: float = 2.0
    num_runs: int = 0


class ModelFit(msgspec.Struct, frozen=True):
    """Everything known of one model on one machine."""

    model: str
    model_hash: str
    dtype: str
    element_bytes: int
    draft_tokens: int
    num_cores: int
    ranks: tuple[RankFit, ...]
    collectives: tuple[CollectiveFit, ...]
    steps: tuple[StepFit, ...]
    host_memory: HostMemory | None = None


class ProbeFactors(msgspec.Struct, frozen=True):
    """How much slower the machine is now than at calibration, by resource (1: as then)."""

    compute: float = 1.0
    memory: float = 1.0
    host: float = 1.0

    def of(self, resource: Resource) -> float:
        return float(getattr(self, resource))


@dataclass(frozen=True, slots=True)
class PricedTable:
    """[N] each; ``components`` add up to ``step_s``. ``barrier_wait_s``, inside it: what the mean data rank waits for the slowest."""

    step_s: Array
    low_s: Array
    high_s: Array
    components: dict[str, Array]
    provenance: dict[str, Provenance]
    extrapolated: np.ndarray
    note: str
    barrier_wait_s: Array


def hull_features(table: FeatureTable) -> dict[str, Array]:
    """[N] each: what a step must lie between the measured ones in."""
    return {
        "tokens": table.tokens.max(axis=1),
        "requests": table.requests.max(axis=1),
        "context_tokens": table.context_tokens.max(axis=1),
        "longest_context_tokens": table.longest_context_tokens.max(axis=1),
    }


class CalibratedCost:
    """Implements ``core.step_cost.StepCost`` for one model and layout. Raises DomainError where the calibration has nothing to go by.

    ``expert_balance``: which experts tokens choose (``imbalance``); None: every rank has the mean rank's share. ``expert_rebalancing``:
    they are placed by load. ``host_memory``: what gives out Engram's rows in the placement "host", where the calibration has not measured
    it; ``ranks_per_host`` ranks share it (default: as many as share the machine that was measured).
    """

    def __init__(
        self,
        fit: ModelFit,
        spec: ModelSpec,
        layout: Layout,
        *,
        probe: ProbeFactors | None = None,
        engram: EngramPlacement = "gpu",
        draft_tokens: int = 0,
        redundant_experts: int = 0,
        expert_balance: ExpertBalance | None = BALANCED,
        expert_rebalancing: bool = False,
        host_memory: HostMemory | None = None,
        ranks_per_host: int | None = None,
    ) -> None:
        self.spec, self.layout, self.fit = spec, layout, fit
        self.place = RankPlace(layout=layout, engram=engram, redundant_experts=redundant_experts)
        self.place.validate_for(spec)
        if draft_tokens and draft_tokens != fit.draft_tokens:
            raise DomainError(f"{fit.model} was calibrated with {fit.draft_tokens} draft tokens; {draft_tokens} were asked for")
        self.draft_tokens = draft_tokens
        self.probe = probe or ProbeFactors()
        ranks = layout.num_gpus
        self.cores, self.busy = cores_of(layout, fit.num_cores)
        self.rank_fit, self.is_own_shape = self._nearest_rank()
        self.step_fit, self.is_own_step = self._nearest_step()
        self.collective = None if ranks == 1 or self.rank_fit.has_collectives else self._collective(ranks)
        self.loads = self._expert_loads(expert_balance, rebalanced=expert_rebalancing)
        self.host_memory = fit.host_memory or host_memory
        self.ranks_per_host = ranks_per_host or min(ranks, fit.num_cores)
        self._single: SinglePrice | None = None

    def _nearest_rank(self) -> tuple[RankFit, bool]:
        alike = [rank for rank in self.fit.ranks if (rank.cores, rank.busy_neighbours) == (self.cores, self.busy)]
        own = [rank for rank in alike if rank.layout == str(self.layout)]
        if own:
            return own[0], True
        if not alike:
            known = sorted({f"{rank.cores} cores with {rank.busy_neighbours} busy neighbours" for rank in self.fit.ranks})
            raise DomainError(
                f"layout {self.layout} gives a rank {self.cores} cores and {self.busy} busy neighbours; {self.fit.model} is calibrated for "
                f"{', '.join(known)}"
            )
        nearest = min(alike, key=lambda rank: _distance(rank.layout, self.layout))
        if nearest.has_collectives:
            imported = ", ".join(rank.layout for rank in self.fit.ranks)
            raise DomainError(f"{self.fit.model} was fitted on whole forwards of {imported}; they say nothing of layout {self.layout}")
        return nearest, False

    def _nearest_step(self) -> tuple[StepFit, bool]:
        alike = [step for step in self.fit.steps if (step.cores, step.busy_neighbours) == (self.cores, self.busy)]
        own = [step for step in alike if step.layout == str(self.layout)]
        if own:
            return own[0], own[0].num_runs > 0
        if alike:
            return min(alike, key=lambda step: _distance(step.layout, self.layout)), False
        return StepFit(str(self.layout), self.cores, self.busy), False

    def _collective(self, ranks: int) -> CollectiveFit | None:
        if not messages(self.spec, self.place, _one_step(self.spec, self.layout.dp), self.fit.element_bytes):
            return None
        if not self.fit.collectives:
            raise DomainError(f"layout {self.layout} needs collectives of {ranks} ranks; none are in the calibration of {self.fit.model}")
        return min(self.fit.collectives, key=lambda entry: abs(np.log(entry.num_ranks / ranks)))

    def _expert_loads(self, balance: ExpertBalance | None, *, rebalanced: bool) -> ExpertLoads | None:
        shape, ep = expert_shape(self.spec), self.layout.ep
        if shape is None or balance is None:
            return None
        if balance.is_balanced and (ep == 1 or self.rank_fit.has_collectives):  # nothing is uneven, or it is in the forwards fitted
            return None
        redundant = self.place.redundant_experts
        return expert_loads(
            shape.num_experts, shape.top_k, shape.num_layers, ep,
            num_redundant=redundant, balance=balance, is_rebalanced=rebalanced,
        )  # fmt: skip

    def price(self, plan: StepPlan) -> StepPrice:
        if len(plan.ranks) == self.layout.dp <= MAX_RANKS:
            self._single = self._single or SinglePrice(self.price_table, self.spec, self.layout.dp)
            return self._single.price(plan)
        priced = self.price_table(table_of_plans([plan], self.spec))
        return StepPrice(
            step_s=float(priced.step_s[0]),
            low_s=float(priced.low_s[0]),
            high_s=float(priced.high_s[0]),
            components={
                name: ComponentPrice(float(seconds[0]), priced.provenance[name])
                for name, seconds in priced.components.items()
                if seconds[0] > 0
            },
            extrapolated=bool(priced.extrapolated[0]),
            note=priced.note,
        )

    def price_stretch(self, contexts: Sequence[Sequence[int]], num_steps: int, saved_tails: Sequence[Sequence[int]]) -> StretchPrice:
        """Implements ``core.stretch.StretchCost``."""
        priced = self.price_table(decode_steps(self.spec, contexts, num_steps, saved_tails))
        return StretchPrice(
            step_s=priced.step_s.tolist(),
            low_s=priced.low_s.tolist(),
            high_s=priced.high_s.tolist(),
            components={name: seconds.tolist() for name, seconds in priced.components.items()},
            provenance=priced.provenance,
            extrapolated=priced.extrapolated.tolist(),
            note=priced.note,
        )

    def rank_seconds(self, table: FeatureTable) -> dict[str, Array]:
        """Seconds [N, R] of each component on each data rank, its collectives left out, as fitted and at the probed speed."""
        if table.num_ranks != self.layout.dp:
            raise DomainError(f"layout {self.layout} has {self.layout.dp} data ranks; the steps have {table.num_ranks}")
        found: dict[str, Array] = {}
        work = terms(self.spec, self.place, table, self.fit.element_bytes, self.draft_tokens, self.loads)
        for name, component in self.rank_fit.components.items():
            if name in work:
                found[name] = evaluate(work[name], component, self.probe)
        if self.place.engram == "host" and "engram.fetch" in found:
            found["engram.fetch"] = self._engram_on_rank(work["engram.fetch"], found["engram.fetch"])
        return found

    def _engram_on_rank(self, work: Sequence[Term], gathered_s: Array) -> Array:
        """[N, R] of Engram's rows from the host. Where its memory is known, a rank only asks for them; else it gathers them as it would at
        home, slower by as many times as there are more ranks at it than were measured."""
        if self.host_memory is None:
            return gathered_s * max(1.0, self.ranks_per_host / (self.busy + 1))
        asked = [term if term.name == LAUNCH else replace(term, count=np.zeros_like(term.count)) for term in work]
        return evaluate(asked, self.rank_fit.components["engram.fetch"]) * self.probe.memory

    def _engram_from_host(self, table: FeatureTable, hidden_s: Array) -> Array:
        """Seconds [N] that a step waits for Engram's rows from the host's memory. A rank with one core has nobody to gather beside it."""
        if self.place.engram != "host" or self.host_memory is None or not isinstance(self.spec, V41Spec):
            return np.zeros(table.num_steps)
        of_rank = np.repeat(table.tokens, self.layout.tp, axis=1) * row_bytes(self.spec, self.fit.element_bytes)
        seconds = gather_seconds(of_rank, self.ranks_per_host, self.host_memory) * self.probe.memory
        return waited_seconds(seconds, hidden_s if self.cores > 1 else np.zeros_like(hidden_s))

    def collective_seconds(self, table: FeatureTable, hidden_s: Array) -> dict[str, Array]:
        """Seconds [N] each kind of collective takes; ranks meet in each, so the largest message decides. ``hidden_s`` [N] is what
        Engram's rows may travel beside."""
        found: dict[str, Array] = {}
        if self.collective is None:
            return found
        engram: list[Array] = []
        for message in messages(self.spec, self.place, table, self.fit.element_bytes, self.draft_tokens, self.loads):
            seconds = message_seconds(self.collective, message, self.layout.num_gpus)
            if message.component == "engram.fetch":
                engram.append(seconds)
            else:
                found[message.component] = found.get(message.component, 0.0) + seconds
        if engram:  # the ids are waited for at once, the rows later
            found["engram.fetch"] = engram[0] + np.maximum(0.0, engram[1] - hidden_s) + sum(engram[2:])
        return {name: seconds * self.probe.host for name, seconds in found.items()}

    def price_table(self, table: FeatureTable) -> PricedTable:
        """Prices of N steps at once."""
        ranks = self.rank_seconds(table)
        total = added(ranks.values())
        step, count = self.step_fit, table.num_steps
        slowest = (np.arange(count), total.argmax(axis=1))
        components = {name: seconds[slowest] * step.compute_scale for name, seconds in ranks.items()}
        hidden_s = self._before_engram(components)
        for name, seconds in self.collective_seconds(table, hidden_s).items():
            components[name] = components.get(name, np.zeros(count)) + seconds * step.collective_scale
        if "engram.fetch" in components:
            components["engram.fetch"] = components["engram.fetch"] + self._engram_from_host(table, hidden_s)
        busy = (table.tokens.sum(axis=1) > 0).astype(np.float64)
        gap = step.gap_s * busy + step.gap_per_request_s * table.requests.sum(axis=1)
        components["host_gap"] = (gap + step.gap_per_start_s * table.started_requests.sum(axis=1)) * self.probe.host
        step_s = added(components.values())
        outside = self._outside(table)
        low, high = self._bounds(outside)
        provenance = {name: self._provenance(name) for name in components}
        extrapolated = (outside > 0) | (self.layout.num_gpus > self.fit.num_cores)
        wait_s = step.compute_scale * (total.max(axis=1) - total.mean(axis=1))
        return PricedTable(step_s, step_s * low, step_s * high, components, provenance, extrapolated, self._note(), wait_s)

    def _before_engram(self, components: Mapping[str, Array]) -> Array:
        """Time of the layers before the first that needs Engram's rows."""
        first = self.spec.engram.layer_ids[0] if isinstance(self.spec, V41Spec) and self.spec.engram else 0
        inside = [seconds for name, seconds in components.items() if name not in ("lm_head", "sampler", "other", "draft", "engram.fetch")]
        return added(inside) * (first / self.spec.num_layers)

    def _outside(self, table: FeatureTable) -> Array:
        """[N] how far a step lies outside the measured hull, in factors of e (0: inside, or a little beyond its edge)."""
        far = np.zeros(table.num_steps)
        for name, values in hull_features(table).items():
            if name in self.rank_fit.low:
                low, high = max(self.rank_fit.low[name], 1e-9), max(self.rank_fit.high[name], 1e-9)
                inside = np.clip(values, low, high)
                far = np.maximum(far, np.where(values > 0, np.abs(np.log(np.maximum(values, 1e-9) / inside)), 0.0))
        return np.where(far > _EDGE, far, 0.0)

    def _bounds(self, outside: Array) -> tuple[Array, Array]:
        step, ranks = self.step_fit, self.layout.num_gpus
        widening = 1.0 if self.is_own_shape and self.is_own_step else SCALED_WIDENING
        if ranks > self.fit.num_cores:
            widening *= SCALED_WIDENING
        factor = widening * (1.0 + EXTRAPOLATION_WIDENING * outside)
        return np.exp(np.log(min(step.low_factor, 1.0)) * factor), np.exp(np.log(max(step.high_factor, 1.0)) * factor)

    def _provenance(self, component: str) -> Provenance:
        if component == "engram.fetch" and self.place.engram == "host":
            if self.host_memory is not None:
                return self.host_memory.provenance(self.ranks_per_host)
            if self.ranks_per_host > self.busy + 1:
                return "scaled"
        if component in ("host_gap", "barrier_wait"):
            return "measured" if self.is_own_step else "interpolated"
        if component in ("dispatch", "combine", "all_reduce", "all_gather"):
            same = self.collective is not None and self.collective.num_ranks == self.layout.num_gpus
            return "interpolated" if same else "scaled"
        return "interpolated" if self.is_own_shape else "scaled"

    def _note(self) -> str:
        notes = []
        if not self.is_own_shape:
            notes.append(f"rank shape of {self.rank_fit.layout}, by FLOP and bytes")
        if not self.is_own_step:
            notes.append(f"whole steps of {self.step_fit.layout}" if self.step_fit.num_runs else "no whole step measured")
        if self.layout.num_gpus > self.fit.num_cores:
            notes.append(f"{self.layout.num_gpus} ranks as if each had a core of its own; {self.fit.num_cores} cores were measured")
        probe = self.probe
        if probe != ProbeFactors():
            notes.append(f"speed probe: compute x{probe.compute:.2f}, memory x{probe.memory:.2f}, host x{probe.host:.2f} of calibration")
        return "; ".join(notes)


_EDGE = float(np.log(1.1))


def cores_of(layout: Layout, num_cores: int) -> tuple[int, int]:
    """(cores of a rank, ranks at work beside it) where ``layout`` shares ``num_cores``."""
    ranks = layout.num_gpus
    return max(1, num_cores // ranks), min(ranks, num_cores) - 1


def added(parts: Iterable[Array]) -> Array:
    """One after the other: the sum of a step does not depend on how many steps are priced with it, as numpy's own sums do."""
    total: Array = np.zeros(())
    for part in parts:
        total = total + part
    return total


def evaluate(work: Sequence[Term], fit: ComponentFit, probe: ProbeFactors | None = None) -> Array:
    """The sum of coefficient x column, each as much slower as its resource, without making the columns that count for nothing. Raises
    DomainError for other columns."""
    if column_names(work) != fit.columns:
        raise DomainError("the calibration was fitted by other terms than this release's; calibrate anew")
    coefficients = iter(fit.coefficients)
    seconds = np.zeros_like(work[0].count, order="C")
    for term in work:
        rate, unit = next(coefficients), term.unit if probe is None else term.unit * probe.of(term.resource)
        if rate:
            seconds += (rate * unit) * term.count
        for knot in term.knots:
            below, beyond = next(coefficients), next(coefficients)
            if below:
                seconds += (below * unit) * np.minimum(term.count, knot)
            if beyond:
                seconds += (beyond * unit) * np.maximum(term.count - knot, 0.0)
    return seconds


def message_seconds(fit: CollectiveFit, message: Messages, num_ranks: int) -> Array:
    """[N] of one kind of message. Among more ranks than measured the latency grows with the others to be met."""
    calls, each = message.calls.max(axis=1), message.bytes_each.max(axis=1)
    sizes, seconds = np.log(np.array(fit.bytes_sent)), np.log(np.array(fit.seconds))
    wanted = np.log(np.maximum(each, fit.bytes_sent[0]))
    beyond = np.maximum(0.0, wanted - sizes[-1])  # at the rate of the last size: as many times the bytes, as many times the seconds
    one = np.exp(np.interp(wanted, sizes, seconds) + beyond)
    grown = max(1.0, (num_ranks - 1) / max(1, fit.num_ranks - 1))
    found: Array = calls * one * grown
    return found


def _distance(layout: str, other: Layout) -> tuple[float, ...]:
    """How unlike two layouts' ranks are: tensor degree first, then experts, then data."""
    mine = parse_layout(layout).decode.unit
    pairs = ((mine.tp, other.tp), (mine.ep, other.ep), (mine.dp, other.dp))
    return tuple(abs(float(np.log(one / two))) for one, two in pairs)


def _one_step(spec: ModelSpec, num_ranks: int) -> FeatureTable:
    one = np.ones((1, num_ranks))
    return uniform_steps(spec, one, one, one)


def check_components(fit: ModelFit) -> None:
    """Raise DomainError for a component nobody knows."""
    for rank in fit.ranks:
        unknown = sorted(set(rank.components) - set(COMPONENTS))
        if unknown:
            raise DomainError(f"unknown components {', '.join(unknown)}")
