"""A fit of what others measured: whole forward passes (``fpm_forward_perf``), or the steps a recording holds.

Neither shows what the host does between two forwards nor what lies beyond the layouts that were run: a forward holds its collectives,
so a calibration made from it prices those layouts alone and says that no whole step was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from calibration.assemble import RANK, HeldOut, Identity, held_out_of
from calibration.cost_model import ComponentFit, ModelFit, RankFit, StepFit, cores_of, hull_features
from calibration.errors import TraceError
from calibration.features import Array, FeatureTable, concatenate, table_of_plans, uniform_steps
from calibration.fit import column_matrix, column_names, conformal_bounds, fit_held_out, log_ratio
from calibration.floors import terms
from calibration.importers.fpm import Passes, read_fpm
from engine.core.errors import DomainError
from engine.core.layout import Layout, parse_layout
from engine.core.plan import RankPlan, StepPlan
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec

_T = TypeVar("_T")
MIN_POINTS = 10
MAX_STEPS = 1_000  # of a recording that are fitted
MAX_FILE_BYTES = 1 << 30
_LEAST_SHARE = 0.02  # of a step: what is less cannot spoil it


@dataclass(frozen=True, slots=True)
class Forwards:
    """Forwards of one layout: seconds [N], and of components [N] where they were told apart."""

    layout: Layout
    table: FeatureTable
    seconds: Array
    components: Mapping[str, Array]


# --- where they come from ---------------------------------------------------------------------------------------------------------


def forwards_of_fpm(path: Path, spec: ModelSpec, model: str) -> tuple[list[Forwards], str]:
    """The passes of ``model`` (or of the only model there is), a layout each; and the system they ran on.

    Raises TraceError where it is not told which rows are meant.
    """
    replicas = read_fpm(path)
    names = list(dict.fromkeys(one.identity.model_path for one in replicas))
    chosen = [name for name in names if model in (name, name.rsplit("/", 1)[-1])] or names
    if len(chosen) > 1:
        raise TraceError(f"{path} holds {len(names)} models ({', '.join(names[:5])}), none of them called {model}; needed: one")
    mine = [one for one in replicas if one.identity.model_path == chosen[0]]
    found: dict[str, Passes] = {}
    for one in mine:
        layout = str(one.identity.layout)
        if layout in found:
            raise TraceError(f"{path}: {layout} of {chosen[0]} comes with {_difference(found[layout], one)}; keep the rows of one")
        found[layout] = one
    first = mine[0].identity
    where = f"{first.system}, {first.backend} {first.backend_version}"
    return [_passes(spec, one) for one in found.values()], where


def _difference(one: Passes, two: Passes) -> str:
    fields = (field.name for field in msgspec.structs.fields(one.identity))
    name = next(field for field in fields if getattr(one.identity, field) != getattr(two.identity, field))
    return f"{name} {getattr(one.identity, name)!r:.40} and {getattr(two.identity, name)!r:.40}"


def _passes(spec: ModelSpec, passes: Passes) -> Forwards:
    """Both totals are shared out evenly, and every data rank has the same to do."""
    layout = passes.identity.layout
    tables = []
    for forward in passes.forwards:
        new = forward.prefill_tokens / forward.requests if forward.kind == "prefill" else 1.0
        cached = forward.kv_tokens / forward.requests + (new if forward.kind == "prefill" else 0.0)
        requests, context, each = (np.full((1, layout.dp), value) for value in (float(forward.requests), cached, new))
        tables.append(uniform_steps(spec, requests, context, each))
    return Forwards(layout, concatenate(tables), np.array([forward.seconds for forward in passes.forwards]), {})


class _StepLine(msgspec.Struct):
    """A line of ``steps.rankN.jsonl``."""

    step: int
    rank: int
    seconds: float
    components: dict[str, float]
    plan: RankPlan


class _Environment(msgspec.Struct):
    """What of ``environment.rankN.json`` is needed here."""

    model: str
    layout: str
    dtype: str
    mode: str
    device: str


def forwards_of_recording(folder: Path, spec: ModelSpec) -> tuple[Forwards, _Environment]:
    """Steps of a folder that the recorder wrote in mode ``timers``: of every rank, the slowest one of a step counts.

    Raises TraceError for a folder that holds none, or too few.
    """
    environments = [_environment(path) for path in sorted(folder.glob("environment.rank*.json"))]
    if not environments:
        raise TraceError(f"{folder} holds no recording (environment.rankN.json, steps.rankN.jsonl); record one with --record-trace")
    first = environments[0]
    if first.mode != "timers":
        raise TraceError(f"{folder} was recorded in mode {first.mode!r:.20}, which slows the steps; needed: mode timers")
    layout = parse_layout(first.layout).decode.unit
    if layout.dp > 1:
        raise TraceError(f"{folder}: a recording of layout {layout} cannot be fitted; record one data rank, or calibrate by measuring")
    slowest: dict[int, _StepLine] = {}
    for path in sorted(folder.glob("steps.rank*.jsonl")):
        for line in _lines(path):
            before = slowest.get(line.step)
            if line.plan.items and (before is None or line.seconds > before.seconds):
                slowest[line.step] = line
    lines = list(slowest.values())
    lines = lines[:: max(1, -(-len(lines) // MAX_STEPS))]
    if len(lines) < MIN_POINTS:
        raise TraceError(f"{folder} holds {len(lines)} steps; needed: {MIN_POINTS} or more")
    table = table_of_plans([StepPlan(line.step, (line.plan,)) for line in lines], spec)
    seconds = np.array([line.seconds for line in lines])
    names = dict.fromkeys(name for line in lines for name in line.components)
    components = {name: np.array([line.components.get(name, 0.0) for line in lines]) for name in names}
    return Forwards(layout, table, seconds, components), first


def _environment(path: Path) -> _Environment:
    return _decoded(path, path.read_bytes() if path.stat().st_size < MAX_FILE_BYTES else b"", _Environment)


def _lines(path: Path) -> list[_StepLine]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TraceError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    found = [_decoded(path, line, _StepLine) for line in path.read_bytes().splitlines()]
    if any(not 0 < line.seconds < np.inf for line in found):
        raise TraceError(f"{path} holds a step whose seconds are no positive number")
    return found


def _decoded(path: Path, text: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is broken: {error}") from None


# --- the fit ----------------------------------------------------------------------------------------------------------------------


def fit_forwards(identity: Identity, spec: ModelSpec, layouts: Sequence[Forwards]) -> tuple[ModelFit, list[HeldOut]]:
    """Raises DomainError where there are too few forwards of a layout."""
    held_out: list[HeldOut] = []
    ranks = tuple(_rank_fit(identity, spec, one, held_out) for one in layouts)
    measured, predicted = (np.array([getattr(entry, name) for entry in held_out if entry.component == RANK]) for name in _BOTH)
    low, high = conformal_bounds(log_ratio(measured, predicted))
    steps = tuple(StepFit(rank.layout, rank.cores, rank.busy_neighbours, low_factor=low, high_factor=high) for rank in ranks)
    fit = ModelFit(
        identity.model, identity.model_hash, identity.dtype, identity.element_bytes, identity.draft_tokens, identity.num_cores,
        ranks, (), steps,
    )  # fmt: skip
    return fit, held_out


_BOTH = ("measured_s", "predicted_s")


def _rank_fit(identity: Identity, spec: ModelSpec, forwards: Forwards, held_out: list[HeldOut]) -> RankFit:
    name, table = str(forwards.layout), forwards.table
    if table.num_steps < MIN_POINTS:
        raise DomainError(f"{identity.model}, layout {name}: {table.num_steps} forward passes; needed: {MIN_POINTS} or more")
    place = RankPlace(layout=forwards.layout)
    place.validate_for(spec)
    work = terms(spec, place, table, identity.element_bytes, identity.draft_tokens)
    total = forwards.seconds
    busiest = table.tokens.argmax(axis=1)
    columns = {part: column_matrix(parts)[np.arange(len(total)), busiest] for part, parts in work.items()}
    groups = _told_apart(forwards, list(work)) or {"": (list(work), total)}
    components: dict[str, ComponentFit] = {}
    unseen = np.zeros(len(total))
    for group, (members, seconds) in groups.items():
        matrix = np.concatenate([columns[part] for part in members], axis=1)
        scale = np.maximum(seconds, _LEAST_SHARE * total)
        fitted = fit_held_out(matrix, seconds, scale)
        weighty = seconds >= _LEAST_SHARE * total
        errors = np.abs(np.expm1(fitted.held_out[weighty])) if weighty.any() else np.zeros(1)
        begin = 0
        for part in members:
            coefficients = fitted.coefficients[begin : begin + columns[part].shape[1]]
            begin += len(coefficients)
            share = float((columns[part] @ coefficients).sum() / total.sum())
            components[part] = ComponentFit(
                column_names(work[part]), tuple(map(float, coefficients)),
                float(np.median(errors)), float(np.quantile(errors, 0.9)), share,
            )  # fmt: skip
        predicted = seconds * np.exp(-fitted.held_out)
        unseen += predicted
        if group:
            held_out += held_out_of(name, group, table, seconds, predicted, weighty)
    held_out += held_out_of(name, RANK, table, total, unseen, np.ones(len(total), dtype=bool))
    cores, busy = cores_of(forwards.layout, identity.num_cores)
    hull = hull_features(table)
    return RankFit(
        name, cores, busy, components, {part: float(values.min()) for part, values in hull.items()},
        {part: float(values.max()) for part, values in hull.items()}, len(total), has_collectives=True,
    )  # fmt: skip


def _told_apart(forwards: Forwards, known: list[str]) -> dict[str, tuple[list[str], Array]]:
    """Every component with its own seconds; what has no terms here, and the time nobody was charged with, is "other". Empty where the
    components were not told apart: then all terms share in the whole."""
    if not forwards.components:
        return {}
    seconds = {name: np.zeros(len(forwards.seconds)) for name in known}
    for name, values in forwards.components.items():
        seconds[name if name in seconds else "other"] += values
    charged = np.sum(list(seconds.values()), axis=0)
    seconds["other"] += np.maximum(forwards.seconds - charged, 0.0)
    return {name: ([name], values) for name, values in seconds.items() if values.any()}
