"""How fast this machine is at the moment of a prediction or a measurement, beside how fast it was when it was calibrated."""

from __future__ import annotations

from calibration.cost_model import ProbeFactors
from calibration.probe import Probe, factors, run_probe
from calibration.store import Calibration, this_machine
from twin.ledger import Speed


def probe_now(calibration: Calibration) -> tuple[ProbeFactors, Speed]:
    """The factors to scale a prediction by, and the same for the ledger; about half a second. A calibration of another machine is not
    scaled: its factors are 1, and what the loops took here is written down all the same."""
    return at_probe(calibration, run_probe())


def at_probe(calibration: Calibration, probe: Probe) -> tuple[ProbeFactors, Speed]:
    """The same of a speed that was seen."""
    then = calibration.probe
    found = factors(then, probe) if then is not None and is_here(calibration) else ProbeFactors()
    return found, Speed(probe.compute_s, probe.memory_s, probe.host_s, found.compute, found.memory, found.host)


def is_here(calibration: Calibration) -> bool:
    return this_machine().host == calibration.machine.host
