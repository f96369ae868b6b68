"""Layouts: how many GPUs, and what each does. The grammar of every ``--layout``:

    unit        tp1dp64ep64, tp2dp4pp2ep8     any order, a part left out is 1
    replicas    4x(tp1dp8ep8)                 independent copies of a unit
    split       P2x(tp1dp8ep8)+D1x(tp1dp32ep32)   prefill and decode apart

A unit has tp*dp*pp GPUs. dp counts attention data-parallel ranks inside one replica, in lock-step with ep; ep divides tp*dp, and each
expert is split over tp*dp/ep GPUs.
"""

from __future__ import annotations

import re

import msgspec

from engine.core.errors import ConfigError
from engine.core.specs import DenseSpec, ModelSpec, V41Spec

MAX_DEGREE = 1 << 20
_PART = re.compile(r"(tp|dp|ep|pp)(\d+)")
_UNIT = re.compile(r"(?:(?:tp|dp|ep|pp)\d+)+")
_GROUP = re.compile(r"(?:(\d+)x\(([^()]*)\)|([^()x]*))")


class Layout(msgspec.Struct, frozen=True):
    """One replica."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """GPUs that share one expert."""
        return self.tp * self.dp // self.ep

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}{f'pp{self.pp}' if self.pp > 1 else ''}ep{self.ep}"

    def validate(self) -> None:
        """Raise ConfigError where no GPUs could be arranged so."""
        for name, value in (("tp", self.tp), ("dp", self.dp), ("ep", self.ep), ("pp", self.pp)):
            if not 1 <= value <= MAX_DEGREE:
                raise ConfigError(f"layout {self}: {name} is {value}; allowed: 1 to {MAX_DEGREE}")
        if self.tp * self.dp % self.ep:
            raise ConfigError(f"layout {self}: ep {self.ep} does not divide tp*dp = {self.tp * self.dp}")

    def validate_for(self, spec: ModelSpec) -> None:
        """Raise ConfigError where ``spec`` cannot be cut so."""
        self.validate()
        divisions = [("num_attention_heads", spec.num_heads, "tp", self.tp)]
        if isinstance(spec, V41Spec):
            divisions += [
                ("o_groups", spec.o_groups, "tp", self.tp),
                ("n_routed_experts", spec.num_experts, "ep", self.ep),
                ("moe_intermediate_size", spec.moe_intermediate_size, "tp*dp/ep", self.expert_tp),
            ]
            shared = spec.num_shared_experts * spec.moe_intermediate_size
            divisions.append(("the shared experts' width", shared, "tp", self.tp))
            if spec.dspark:
                divisions.append(("dspark_n_routed_experts", spec.dspark.num_experts, "ep", self.ep))
        elif isinstance(spec, DenseSpec):
            if self.tp < spec.num_kv_heads:
                divisions.append(("num_key_value_heads", spec.num_kv_heads, "tp", self.tp))
            elif self.tp % spec.num_kv_heads:
                raise ConfigError(f"layout {self}: tp is not a multiple of num_key_value_heads {spec.num_kv_heads} of {spec.name}")
            if spec.num_moe_layers < spec.num_layers:
                divisions.append(("intermediate_size", spec.intermediate_size, "tp", self.tp))
            if spec.moe is not None:
                divisions += [
                    ("num_experts", spec.moe.num_experts, "ep", self.ep),
                    ("moe_intermediate_size", spec.moe.intermediate_size, "tp*dp/ep", self.expert_tp),
                ]
            elif self.ep > 1:
                raise ConfigError(f"layout {self}: {spec.name} has no experts; ep must be 1")
        for what, value, name, degree in divisions:
            if value % degree:
                raise ConfigError(f"layout {self}: {what} {value} of {spec.name} is not a multiple of {name} = {degree}")
        if self.pp > spec.num_layers:
            raise ConfigError(f"layout {self}: pp {self.pp} exceeds the {spec.num_layers} layers of {spec.name}")


class Replicas(msgspec.Struct, frozen=True):
    """``count`` independent copies of ``unit``."""

    unit: Layout
    count: int = 1

    @property
    def num_gpus(self) -> int:
        return self.count * self.unit.num_gpus

    def __str__(self) -> str:
        return str(self.unit) if self.count == 1 else f"{self.count}x({self.unit})"


class Deployment(msgspec.Struct, frozen=True):
    """What a ``--layout`` names. ``prefill`` is None where the same GPUs prefill and decode; else ``decode`` only decodes."""

    decode: Replicas
    prefill: Replicas | None = None

    @property
    def num_gpus(self) -> int:
        return self.decode.num_gpus + (self.prefill.num_gpus if self.prefill else 0)

    def __str__(self) -> str:
        if self.prefill is None:
            return str(self.decode)
        return f"P{_explicit(self.prefill)}+D{_explicit(self.decode)}"

    def validate_for(self, spec: ModelSpec) -> None:
        """Raise ConfigError where ``spec`` cannot be cut so."""
        for group in (self.prefill, self.decode):
            if group is not None:
                group.unit.validate_for(spec)

    def why_not_runnable(self) -> str | None:
        """What of this layout the engine cannot run yet; None where it runs."""
        unit = self.decode.unit
        if self.prefill is not None:
            return f"layout {self}: a prefill/decode split is not run by this release"
        if unit.pp > 1:
            return f"layout {self}: pipeline parallelism (pp{unit.pp}) is not run by this release"
        if self.decode.count > 1:
            return f"layout {self}: this release runs one replica, not {self.decode.count}"
        return None


def parse_layout(text: str) -> Deployment:
    """Raises ConfigError with the reason; whitespace and case do not matter, but P and D are written large or small alike."""
    compact = re.sub(r"\s+", "", text)
    lowered = compact.lower()
    if "+" in lowered:
        parts = lowered.split("+")
        if len(parts) != 2 or not parts[0].startswith("p") or not parts[1].startswith("d") or parts[0].startswith("pp"):
            raise ConfigError(f"layout {text!r}: a split is written P2x(tp1dp8ep8)+D1x(tp1dp32ep32)")
        return Deployment(decode=_group(parts[1][1:], text), prefill=_group(parts[0][1:], text))
    return Deployment(decode=_group(lowered, text))


def _group(part: str, text: str) -> Replicas:
    match = _GROUP.fullmatch(part)
    if match is None:
        raise ConfigError(f"layout {text!r}: {part!r} is neither a unit (tp1dp8ep8) nor replicas of one (4x(tp1dp8ep8))")
    count = 1 if match[1] is None else _number(match[1], "replicas", text)
    return Replicas(_unit(match[3] if match[2] is None else match[2], text), count)


def _unit(part: str, text: str) -> Layout:
    if not _UNIT.fullmatch(part):
        raise ConfigError(f"layout {text!r}: {part!r} is not a unit such as tp1dp8ep8")
    degrees: dict[str, int] = {}
    for name, number in _PART.findall(part):
        if name in degrees:
            raise ConfigError(f"layout {text!r}: {name} is given twice")
        degrees[name] = _number(number, name, text)
    layout = Layout(**degrees)
    layout.validate()
    return layout


def _number(digits: str, name: str, text: str) -> int:
    if len(digits) > 7 or not 1 <= int(digits) <= MAX_DEGREE:
        raise ConfigError(f"layout {text!r}: {name} is {digits}; allowed: 1 to {MAX_DEGREE}")
    return int(digits)


def _explicit(group: Replicas) -> str:
    return f"{group.count}x({group.unit})"
