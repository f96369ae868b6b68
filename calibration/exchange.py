"""``twinfer calibrate --from SOURCE`` and ``twinfer calibrate export``: what others measured comes in, what we measured goes out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from calibration import store
from calibration.assemble import RANK, HeldOut, Identity
from calibration.calibrate import spec_hash
from calibration.cost_model import ModelFit
from calibration.imported import Forwards, fit_forwards, forwards_of_fpm, forwards_of_recording
from calibration.importers import aic, fpm
from calibration.importers.fpm import BALANCED, SPREAD, Forward, Passes, write_fpm
from engine.core.errors import ConfigError, DomainError
from engine.core.layout import Layout, parse_layout
from engine.core.memory import DTYPE_BYTES
from engine.core.specs import DenseSpec, ModelSpec
from engine.version import VERSION

_FOREIGN_DTYPE = "bfloat16"  # of the rows that ranks send each other, and of a cache, where a source does not say


def calibrate_from(sources: Sequence[str], out: Path, name: str, spec: ModelSpec) -> store.Calibration:
    """Fit ``name`` on ``sources``: recordings' folders and ``fpm:FILE``, a layout each. Raises ConfigError or TraceError for what cannot be
    fitted."""
    found: dict[str, tuple[Forwards, str, str]] = {}
    for source in sources:
        for forwards, where, dtype in _read(source, name, spec):
            layout = str(forwards.layout)
            if layout in found:
                raise ConfigError(f"--from {source}: layout {layout} comes from another source too; name one for each layout")
            found[layout] = (forwards, where, dtype)
    dtypes = {dtype for _, _, dtype in found.values()}
    if len(dtypes) > 1:
        raise ConfigError(f"--from: the sources have {', '.join(sorted(dtypes))}; needed: one dtype")
    dtype = dtypes.pop()
    num_cores = max(forwards.layout.num_gpus for forwards, _, _ in found.values())
    identity = Identity(name, spec_hash(spec), dtype, DTYPE_BYTES[dtype], 0, num_cores)
    fit, held_out = fit_forwards(identity, spec, [forwards for forwards, _, _ in found.values()])
    places = ", ".join(dict.fromkeys(where for _, where, _ in found.values()))
    # Not this machine's: its host matches none, so nothing is scaled by this machine's speed or judged by its memory.
    machine = store.Machine("imported", places[:200], num_cores, "imported", "", None, VERSION)
    return store.save(out, store.new_calibration((fit,), None, machine), held_out, [name] * len(held_out))


def _read(source: str, name: str, spec: ModelSpec) -> list[tuple[Forwards, str, str]]:
    """(forwards, where they were measured, dtype) of every layout in it."""
    if source.startswith(aic.PREFIX):
        raise ConfigError(
            f"--from {source}: kernels of a published system say nothing of the steps between them, and are priced for the systems of the "
            "catalogue (twinfer predict --system); a calibration is fitted on recordings' folders or fpm:FILE"
        )
    if source.startswith(fpm.PREFIX):
        layouts, where = forwards_of_fpm(Path(source.removeprefix(fpm.PREFIX)), spec, name)
        return [(forwards, where, _FOREIGN_DTYPE) for forwards in layouts]
    if not Path(source).is_dir():
        raise ConfigError(
            f"--from {source}: needed is the folder of a recording (--record-trace DIR --record-mode timers) or fpm:FILE; a kernel table "
            "alone holds no plans to fit on"
        )
    forwards, environment = forwards_of_recording(Path(source), spec)
    if environment.model != spec.name:
        raise ConfigError(f"--from {source} is a recording of {environment.model:.60}; --model is {name}")
    if environment.dtype not in DTYPE_BYTES:
        raise ConfigError(f"--from {source}: dtype {environment.dtype!r:.40}; allowed: {', '.join(DTYPE_BYTES)}")
    return [(forwards, environment.device, environment.dtype)]


def export_fpm(path: Path, out: Path, model: str | None, specs: dict[str, ModelSpec]) -> int:
    """Write the measured forwards of a calibration as ``fpm_forward_perf``, and say how many. Ranks that were measured beside stand-ins of
    their peers are no whole forwards and stay behind."""
    calibration = store.load(path)
    held_out, models = store.load_held_out(path)
    replicas = []
    for fit in calibration.models:
        if model is not None and fit.model != model:
            continue
        mine = [entry for entry, name in zip(held_out, models, strict=True) if name == fit.model and entry.component == RANK]
        whole = {rank.layout for rank in fit.ranks if rank.has_collectives} | {str(Layout())}
        for layout in dict.fromkeys(entry.layout for entry in mine if entry.layout in whole):
            forwards = [_forward(entry) for entry in mine if entry.layout == layout]
            known = tuple(dict.fromkeys(one for one in forwards if one is not None))
            if known:
                replicas.append(Passes(_identity(fit, specs[fit.model], layout, calibration.machine), known))
    if not replicas:
        raise DomainError(f"{path} holds no whole forward of prompts or of decodes alone{f' of {model}' if model else ''}")
    write_fpm(out, replicas)
    return sum(len(one.forwards) for one in replicas)


def _forward(entry: HeldOut) -> Forward | None:
    """None for a step of prompts and decodes together, which the columns cannot name."""
    requests = round(entry.requests)
    if entry.prompt_tokens == 0 and entry.tokens == entry.requests:
        policy = BALANCED if requests == 1 else SPREAD
        return Forward("decode", requests, 0, round(entry.context_tokens), entry.measured_s, policy)
    if entry.prompt_tokens == entry.tokens:
        return Forward("prefill", requests, round(entry.tokens), round(entry.context_tokens - entry.tokens), entry.measured_s)
    return None


def _identity(fit: ModelFit, spec: ModelSpec, layout: str, machine: store.Machine) -> fpm.Identity:
    unit, has_experts = parse_layout(layout).decode.unit, not isinstance(spec, DenseSpec) or spec.moe is not None
    return fpm.Identity(
        model_path=fit.model,
        system=re.sub(r"[^a-z0-9]+", "_", machine.cpu.lower()).strip("_") or "cpu",
        backend="twinfer",
        backend_version=machine.twinfer,
        weight_quantization=fit.dtype,
        gemm_quant_mode=fit.dtype,
        moe_quant_mode=fit.dtype if has_experts else None,
        fmha_quant_mode=fit.dtype,
        comm_quant_mode=fit.dtype,
        kv_cache_dtype=fit.dtype,
        tp=unit.tp,
        pp=1,
        dp=unit.dp,
        moe_tp=unit.expert_tp,
        moe_ep=unit.ep,
        cp=1,
        moe_backend="auto",
        attention_backend="auto",
        enable_wideep=False,
        enable_eplb=False,
    )
