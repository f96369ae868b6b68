"""What a cost model answers: the price of a step before it runs. The engine and the twin get one injected and know no other."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from engine.core.plan import StepPlan

# measured: fitted on this shape of rank, on this machine; interpolated: between measured ones; scaled: by FLOP and bytes from another shape
# of rank; roofline: from the device's published rates alone. From the best to the weakest; given: stated by who asked, measured by nobody.
Provenance = Literal["measured", "interpolated", "scaled", "roofline", "given"]


class ComponentPrice(msgspec.Struct, frozen=True):
    """Seconds of one component (a name of ``specs.COMPONENTS``) on the slowest rank, and where the number comes from."""

    seconds: float
    provenance: Provenance


class StepPrice(msgspec.Struct, frozen=True):
    """Seconds from commit to commit: the expectation and a 90 % interval around it. ``components`` add up to ``step_s``.

    ``extrapolated``: the step lies outside what the model was fitted on; the interval is then widened by how far.
    """

    step_s: float
    low_s: float
    high_s: float
    components: dict[str, ComponentPrice]
    extrapolated: bool = False
    note: str = ""  # of the provenance: scaling by a speed probe, a substituted shape


class StepCost(Protocol):
    """A cost model of one replica: one model, layout and machine."""

    def price(self, plan: StepPlan) -> StepPrice:
        """Never negative, never without an interval. Raises DomainError for a plan of another number of ranks."""
        ...
