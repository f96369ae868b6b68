"""``twinfer calibrate`` and ``twinfer predict``.

calibrate --out FILE measures models on this machine (real steps of one rank, collectives, whole steps of the engine) and fits their costs;
``calibrate report FILE --out report.html`` draws how good the fit is; ``calibrate next FILE`` names the measurements that would help a
question most. ``--from SOURCE`` fits what was measured elsewhere: the folder of a recording (--record-trace DIR --record-mode timers), or
``fpm:FILE``, AIConfigurator's fpm_forward_perf.parquet with its sidecar; ``calibrate export FILE --out F.parquet`` writes such a pair.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.command_line import add_common_arguments, print_json
from engine.core.errors import ConfigError
from engine.writing import check_file, whole_file

if TYPE_CHECKING:
    from calibration.calibrate import RunSteps
    from calibration.store import Calibration
    from engine.core.specs import ModelSpec

# (path of the page, provenance, held-out predictions): drawn by the dashboards.
DrawReport = Callable[[Path, dict[str, Any], Sequence[dict[str, Any]]], None]
_INSTALL = "pip install 'twinfer[calibration]'"
MAX_BATCH, MAX_TOKENS = 65536, 1 << 24


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    *,
    read_spec: Callable[[str], ModelSpec],
    run_steps: RunSteps,
    draw_report: DrawReport,
) -> None:
    """Add the commands. Engine and dashboards are injected: ``read_spec`` opens a model's config, ``run_steps`` runs whole steps."""
    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine and fit a cost model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    calibrate.add_argument("action", nargs="?", choices=("run", "report", "next", "export"), default="run", help="default: run")
    calibrate.add_argument("file", nargs="?", type=Path, metavar="FILE", help="report, next, export: the calibration to read")
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="the calibration to write; report: the page (HTML); export: the table")
    calibrate.add_argument("--model", action="append", metavar="M", help="a model to measure, or asked about; may be repeated (tiny-v41)")
    calibrate.add_argument("--quick", action="store_true", help="at most 90 s in all; without it at most 10 min a model")
    calibrate.add_argument("--budget", type=float, metavar="SECONDS", help="measuring time of each model (20 to 3600)")
    calibrate.add_argument("--max-batch", type=int, default=32, metavar="N", help="requests per DP rank to cover (default 32)")
    calibrate.add_argument("--max-context", type=int, default=1024, metavar="TOKENS", help="tokens in cache of a request to cover (1024)")
    calibrate.add_argument("--draft-tokens", type=int, default=0, metavar="N", help="calibrate steps that draft N tokens (default 0)")
    calibrate.add_argument("--load-format", choices=("auto", "random"), default=None, help="random weights for models that have none")
    calibrate.add_argument(
        "--from", dest="source", action="append", metavar="SOURCE", help="fit this instead of measuring; may be repeated"
    )
    calibrate.add_argument("--layout", action="append", metavar="L", help="next: layouts asked about")
    calibrate.add_argument("--batch-sizes", default="1,8,32", metavar="B[,B...]", help="next: batch sizes asked about")
    calibrate.add_argument("--context", type=int, default=256, metavar="TOKENS", help="next: prompt length asked about")
    calibrate.add_argument("--new-tokens", type=int, default=32, metavar="N", help="next: generated tokens asked about")
    calibrate.set_defaults(run=lambda arguments: _calibrate(arguments, read_spec, run_steps, draw_report))
    predict = commands.add_parser("predict", help="step time of layouts and batch sizes, before any run", description=_PREDICT)
    predict.add_argument("--model", required=True, metavar="M", help="a model, as for generate")
    source = predict.add_mutually_exclusive_group(required=True)
    source.add_argument("--calibration", type=Path, metavar="FILE", help="what calibrate wrote")
    source.add_argument("--system", metavar="NAME", help="a system of the catalogue (not in this release)")
    predict.add_argument("--layout", required=True, metavar="L[,L...]", help="as for generate")
    predict.add_argument("--batch-sizes", required=True, metavar="B[,B...]", help="requests per DP rank")
    predict.add_argument("--context", type=int, default=256, metavar="TOKENS", help="prompt length, as of bench steps (default 256)")
    predict.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens generated a request; 1 is prefill (default 32)")
    predict.add_argument("--method", choices=("window", "first-batches"), default="window", help="as of bench steps (default window)")
    predict.add_argument("--draft-tokens", type=int, default=0, metavar="N", help="drafted and verified a step (default 0)")
    predict.add_argument(
        "--acceptance",
        default="0",
        metavar="A",
        help="accepted drafts a step, without the bonus token: the mean, shares by position (0.9,0.8,0.6), or measured:FILE",
    )
    predict.add_argument("--engram", choices=("gpu", "replicated", "host"), default="gpu", help="where Engram's tables are (default gpu)")
    predict.add_argument("--redundant-experts", type=int, default=0, metavar="N", help="as for serve (default 0)")
    predict.add_argument("--expert-balance", default="balanced", metavar="B", help=_EXPERT_BALANCE)
    predict.add_argument("--expert-rebalancing", "--eplb", action="store_true", help="experts are placed by their loads, as of serve")
    predict.add_argument("--no-probe", action="store_true", help="do not scale by how fast this machine is now")
    predict.set_defaults(run=lambda arguments: _predict(arguments, read_spec))
    for parser in (calibrate, predict):
        add_common_arguments(parser, "times in seconds, sizes in bytes")


_EXPERT_BALANCE = (
    "which experts tokens choose: balanced (all alike), zipf:S (by rank^-S), or measured:FILE: a saved /metrics, or counts in JSON"
)

_PREDICT = """Step time, commit to commit, of what bench steps would measure with the same --layout, --batch-sizes, --context,
--new-tokens and --method: the median over whole steps. lo_s and hi_s bound 90 % of such measurements."""


def _calibrate(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec], run_steps: RunSteps, draw_report: DrawReport) -> int:
    _require_libraries("calibrate")
    if arguments.action == "report":
        return _report(arguments, draw_report)
    if arguments.action == "next":
        return _next(arguments, read_spec)
    if arguments.action == "export":
        return _export(arguments, read_spec)
    return _run(arguments, read_spec, run_steps)


def _run(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec], run_steps: RunSteps) -> int:
    from calibration import calibrate, store

    if arguments.out is None:
        raise ConfigError("--out is missing: the file to write the calibration to")
    check_file("--out", arguments.out)
    if arguments.source:
        return _fit_sources(arguments, read_spec)
    _require_engine()
    _bounds("--max-batch", arguments.max_batch, 1, 4096)
    _bounds("--max-context", arguments.max_context, 32, 1 << 20)
    names = arguments.model or ["tiny-v41"]
    budget_s = calibrate.QUICK_S / len(names) if arguments.quick else calibrate.FULL_S
    if arguments.budget is not None:
        budget_s = arguments.budget
    if not 20.0 <= budget_s <= 3600.0:
        raise ConfigError(f"the measuring time of a model is {budget_s:g} s; needed: 20 to 3600. Fewer models, or --budget")
    partial = arguments.out.with_name(f"{arguments.out.name}.partial")
    if partial.exists():
        print(f"going on from the points in {partial}; remove it to begin anew", file=sys.stderr)
    targets = [_target(name, read_spec(name), arguments) for name in names]
    measured = [
        calibrate.measure(
            target,
            budget_s=budget_s,
            max_batch=arguments.max_batch,
            max_context=arguments.max_context,
            run_steps=run_steps,
            partial=partial,
            progress=PhaseProgress(),
        )
        for target in targets
    ]
    then, fits, entries, models = calibrate.speed_of(measured), [], [], list[str]()
    for target, one in zip(targets, measured, strict=True):
        fit, held_out = calibrate.fit(target, one, then)
        fits.append(fit)
        entries += held_out
        models += [target.name] * len(held_out)
    written = store.save(arguments.out, store.new_calibration(tuple(fits), then), entries, models)
    partial.unlink(missing_ok=True)
    _print_calibration(written, arguments.json)
    return 0


def _print_calibration(written: Calibration, as_json: bool) -> None:
    if as_json:
        print_json(_summary(written))
    else:
        print("\n".join(_lines(written)))


def _fit_sources(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec]) -> int:
    from calibration.exchange import calibrate_from

    if arguments.model is None or len(arguments.model) != 1:
        raise ConfigError("--from needs --model once: the model that the source is of")
    name = arguments.model[0]
    _print_calibration(calibrate_from(arguments.source, arguments.out, name, read_spec(name)), arguments.json)
    return 0


def _export(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec]) -> int:
    from calibration import store
    from calibration.exchange import export_fpm
    from calibration.importers.fpm import sidecar_of

    if arguments.file is None or arguments.out is None:
        raise ConfigError(
            "calibrate export needs the calibration and the table: twinfer calibrate export FILE --out fpm_forward_perf.parquet"
        )
    for path in (arguments.out, sidecar_of(arguments.out)):
        check_file("--out", path)
    wanted = arguments.model[0] if arguments.model else None
    specs = {fit.model: read_spec(fit.model) for fit in store.load(arguments.file).models if wanted in (None, fit.model)}
    count = export_fpm(arguments.file, arguments.out, wanted, specs)
    if arguments.json:
        print_json({"table": str(arguments.out), "num_forwards": count})
    else:
        print(f"{arguments.out}: {count} forwards")
    return 0


def _target(name: str, spec: ModelSpec, arguments: argparse.Namespace) -> Any:
    from calibration.calibrate import Target, auto_dtype, spec_hash

    if not 0 <= arguments.draft_tokens <= spec.max_draft_tokens:
        raise ConfigError(f"--draft-tokens is {arguments.draft_tokens}; {name} drafts at most {spec.max_draft_tokens}")
    return Target(name, spec, spec_hash(spec), auto_dtype(spec), arguments.load_format or "auto", arguments.draft_tokens)


class PhaseProgress:
    """A line for every tenth of a phase; a bar would need a terminal to itself."""

    def __init__(self) -> None:
        self._phase, self._tenth = "", -1

    def __call__(self, phase: str, done: int, total: int) -> None:
        tenth = done * 10 // max(total, 1)
        if phase != self._phase or tenth > self._tenth:
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{phase}: {done} of {total} s{' ' * 20}", end=end, file=sys.stderr, flush=True)
            self._phase, self._tenth = phase, tenth


def _summary(calibration: Calibration) -> dict[str, Any]:
    models = []
    for fit in calibration.models:
        ranks = [
            {
                "layout": rank.layout,
                "cores": rank.cores,
                "busy_neighbours": rank.busy_neighbours,
                "points": rank.num_points,
                "components": {
                    name: {"share": component.share, "median_error": component.held_out_median, "p90_error": component.held_out_p90}
                    for name, component in sorted(rank.components.items(), key=lambda entry: -entry[1].share)
                },
            }
            for rank in fit.ranks
        ]
        steps = [
            {
                "layout": step.layout,
                "runs": step.num_runs,
                "compute_scale": step.compute_scale,
                "collective_scale": step.collective_scale,
                "gap_s": step.gap_s,
                "interval": [step.low_factor, step.high_factor],
            }
            for step in fit.steps
        ]
        models.append({"model": fit.model, "dtype": fit.dtype, "draft_tokens": fit.draft_tokens, "ranks": ranks, "steps": steps})
    return {"made": calibration.made, "machine": calibration.machine, "probe": calibration.probe, "models": models}


def _lines(calibration: Calibration) -> list[str]:
    """Held-out errors of each component as a person reads them."""
    lines = []
    for model in _summary(calibration)["models"]:
        for rank in model["ranks"]:
            neighbours = f", {rank['busy_neighbours']} busy neighbours" if rank["busy_neighbours"] else ""
            lines.append(f"{model['model']} {rank['layout']} ({rank['cores']} cores a rank{neighbours}; {rank['points']} shapes)")
            lines.append("  component          share  median error  p90 error (held out)")
            lines += [
                f"  {name:<18} {one['share']:>5.1%}  {one['median_error']:>12.1%}  {one['p90_error']:>9.1%}"
                for name, one in rank["components"].items()
                if one["share"] >= 0.005
            ]
        for step in model["steps"]:
            low, high = step["interval"]
            lines.append(
                f"  whole steps {step['layout']}: {step['runs']} runs, compute x{step['compute_scale']:.2f}, "
                f"90 % within x{low:.2f} to x{high:.2f}"
            )
    return lines


def _report(arguments: argparse.Namespace, draw_report: DrawReport) -> int:
    import msgspec

    from calibration import store

    if arguments.file is None or arguments.out is None:
        raise ConfigError("calibrate report needs the calibration and the page: twinfer calibrate report FILE --out report.html")
    check_file("--out", arguments.out)
    calibration = store.load(arguments.file)
    held_out, models = store.load_held_out(arguments.file)
    rows = [{"model": model, **_fields(entry)} for model, entry in zip(models, held_out, strict=True)]
    try:
        with whole_file("--out", arguments.out) as beside:
            draw_report(beside, msgspec.to_builtins(_summary(calibration)), rows)
    except ImportError:
        raise ConfigError("calibrate report needs plotly: pip install 'twinfer[dashboards]'") from None
    if arguments.json:
        print_json({"page": str(arguments.out)})
    else:
        print(arguments.out)
    return 0


def _fields(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("layout", "component", "tokens", "context_tokens", "measured_s", "predicted_s")}


def _next(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec]) -> int:
    from calibration import store
    from calibration.next_points import suggestions
    from engine.core.layout import parse_layout

    if arguments.file is None or not arguments.model:
        raise ConfigError("calibrate next needs the calibration and --model: twinfer calibrate next FILE --model M --layout L")
    calibration, name = store.load(arguments.file), arguments.model[0]
    spec = read_spec(name)
    fit = calibration.model(name, _hash(spec))
    layouts = [parse_layout(text) for text in ",".join(arguments.layout or ["tp1dp1ep1"]).split(",")]
    found = suggestions(fit, spec, layouts, parse_batches(arguments.batch_sizes), arguments.context, arguments.new_tokens)
    if arguments.json:
        print_json({"suggestions": found})
    else:
        print("\n".join(f"{one['reason']}: {one['command']}" for one in found) or "nothing: the question lies inside what was measured")
    return 0


def _predict(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec]) -> int:
    _require_libraries("predict")
    from calibration import store
    from calibration.imbalance import parse_expert_balance
    from calibration.measured import parse_acceptance
    from calibration.predict import Question, points
    from calibration.probe import factors, run_probe
    from engine.core.layout import parse_layout

    if arguments.system is not None:
        raise ConfigError(f"--system {arguments.system}: published systems are not in this release; calibrate one and use --calibration")
    _bounds("--context", arguments.context, 1, MAX_TOKENS)
    _bounds("--new-tokens", arguments.new_tokens, 1, 1 << 20)
    _bounds("--draft-tokens", arguments.draft_tokens, 0, 64)
    acceptance = parse_acceptance(arguments.acceptance, arguments.draft_tokens)
    balance = parse_expert_balance(arguments.expert_balance)
    batches = parse_batches(arguments.batch_sizes)
    calibration = store.load(arguments.calibration)
    spec = read_spec(arguments.model)
    if arguments.context + arguments.new_tokens > spec.max_positions:
        raise ConfigError(
            f"--context {arguments.context} and --new-tokens {arguments.new_tokens} exceed the {spec.max_positions} tokens"
            " a request may have"
        )
    fit = calibration.model(arguments.model, _hash(spec))
    here = store.this_machine()
    same = here.host == calibration.machine.host
    if same and here.num_cores != calibration.machine.num_cores:
        print(f"calibrated on {calibration.machine.num_cores} cores; this process may use {here.num_cores}", file=sys.stderr)
    probe = None if arguments.no_probe or not same else factors(calibration.probe, run_probe())
    question = Question(
        spec,
        context=arguments.context,
        new_tokens=arguments.new_tokens,
        draft_tokens=arguments.draft_tokens,
        acceptance=acceptance,
        engram=arguments.engram,
        redundant_experts=arguments.redundant_experts,
        expert_balance=balance,
        expert_rebalancing=arguments.expert_rebalancing,
        method=arguments.method,
        memory_bytes=_memory_bytes() if same else None,
    )
    found = points(fit, question, [parse_layout(text) for text in arguments.layout.split(",")], batches, probe)
    if arguments.json:
        print_json({"model": arguments.model, "calibration": {"made": calibration.made, "machine": calibration.machine}, "points": found})
    else:
        print(f"{'layout':<14} {'batch':>5}  {'step ms':>9}  {'90 % within':>19}  tokens/s/user")
        for one in found:
            within = f"{one['lo_s'] * 1e3:.2f} to {one['hi_s'] * 1e3:.2f}"
            flag = "  extrapolated" if one["extrapolated"] else ""
            step_ms, rate = one["step_s"] * 1e3, one["tokens_per_s_per_user"]
            place = f"{one['layout']:<14} {one['batch']:>5}"
            print(f"{place}  {step_ms:>9.2f}  {within:>19}  {rate:.2f}{flag}")
    return 0


def _hash(spec: ModelSpec) -> str:
    from calibration.calibrate import spec_hash

    return spec_hash(spec)


def parse_batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 256 or not all(part.isdecimal() and len(part) <= 5 and 1 <= int(part) <= MAX_BATCH for part in parts):
        raise ConfigError(f"--batch-sizes is {text[:80]!r}; needed: integers from 1 to {MAX_BATCH}, separated by commas")
    return [int(part) for part in parts]


def _bounds(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{flag} is {value}; needed: an integer from {low} to {high}")


def _memory_bytes() -> int | None:
    """Of this machine, shared by its ranks: what a rank may fill is not known before it runs."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _require_libraries(command: str) -> None:
    try:
        import numpy  # noqa: F401
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"twinfer {command} needs numpy, scipy and pyarrow ({error.name} is missing): {_INSTALL}") from None


def _require_engine() -> None:
    for name in ("torch", "trio"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"calibrate needs the engine to measure: pip install 'twinfer[engine,calibration]' ({name} is missing); --from fits what "
                "was measured elsewhere"
            )
