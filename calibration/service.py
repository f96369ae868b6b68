"""The cost model of a running engine, from a calibration that must be of the same model, dtype, layout and share of the machine."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from calibration import store
from calibration.calibrate import spec_hash
from calibration.cost_model import CalibratedCost, ProbeFactors
from calibration.probe import factors, run_probe
from engine.core.errors import ConfigError, DomainError
from engine.core.layout import parse_layout
from engine.core.plan import PlanItem, RankPlan, StepPlan
from engine.core.sharding import EngramPlacement
from engine.core.specs import ModelSpec

_log = logging.getLogger("twinfer.calibration")


class Service(msgspec.Struct, frozen=True):
    """The engine whose steps are to be priced; fields as of its workers."""

    model: str
    spec: ModelSpec
    layout: str
    dtype: str
    device: str
    num_threads: int | None
    engram: EngramPlacement
    draft_tokens: int


def cost_of_service(path: Path, service: Service) -> CalibratedCost:
    """Prices at the speed that the machine has now (half a second's probe). Raises ConfigError for a calibration of something else."""
    calibration = store.load(path)
    layout = parse_layout(service.layout).decode.unit
    try:
        fit = calibration.model(service.model, spec_hash(service.spec))
        if fit.dtype != service.dtype:
            raise DomainError(f"it was made with dtype {fit.dtype}, and the engine runs {service.dtype}")
        if service.device != "cpu":
            raise DomainError(f"it was made on the cores of a CPU, and the engine runs on {service.device}")
        here = store.this_machine().host == calibration.machine.host
        probe = factors(calibration.probe, run_probe()) if here and calibration.probe is not None else ProbeFactors()
        cost = CalibratedCost(fit, service.spec, layout, probe=probe, engram=service.engram, draft_tokens=service.draft_tokens)
        if service.num_threads not in (None, cost.cores):
            raise DomainError(f"it knows ranks with {cost.cores} cores, and those of the engine have {service.num_threads} threads")
        item = PlanItem(0, 0, 1, 1 + service.draft_tokens, service.draft_tokens, True)
        note = cost.price(StepPlan(0, (RankPlan(items=(item,)),) * layout.dp)).note  # a fit by other terms fails here
    except DomainError as error:
        raise ConfigError(f"--calibration {path} is not of this engine: {error}") from None
    if not here:
        _log.warning("--calibration %s was made on another machine (%s)", path, calibration.machine.cpu)
    if note:
        _log.info("--calibration %s: %s", path, note)
    return cost
