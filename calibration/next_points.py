"""What to measure next: the few measurements that would narrow the interval of a question most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration.cost_model import CalibratedCost, ModelFit, hull_features
from calibration.features import table_of_plans
from calibration.predict import Question
from calibration.steady import closed_loop, reduced
from engine.core.layout import Deployment
from engine.core.specs import ModelSpec

MAX_SUGGESTIONS = 5
# A component with so much of a step's variance is worth a longer campaign.
_WORTH_SHARE = 0.25
_FEW_RUNS = 10


def suggestions(
    fit: ModelFit, spec: ModelSpec, layouts: Sequence[Deployment], batches: Sequence[int], context: int, new_tokens: int
) -> list[dict[str, Any]]:
    """Best first: ``reason``, ``command``, and ``gain``, the share of the interval's width (in logarithms) it could take away."""
    found: list[dict[str, Any]] = []
    for deployment in layouts:
        layout = deployment.decode.unit
        cost = CalibratedCost(fit, spec, layout)
        question = Question(spec, context=context, new_tokens=new_tokens)
        tables = [table_of_plans(closed_loop(reduced(question.load(batch, layout.dp))[0]).plans, spec) for batch in batches]
        for name in ("tokens", "requests", "context_tokens", "longest_context_tokens"):
            highest = max(float(hull_features(table)[name].max()) for table in tables)
            known = cost.rank_fit.high[name]
            if highest > known * 1.1:
                gain = 1.0 - 1.0 / (1.0 + float(np.log(highest / known)))
                flags = f"--max-batch {max(batches)} --max-context {context + new_tokens}"
                found.append(_entry(f"{layout}: up to {highest:,.0f} {name} asked for, {known:,.0f} measured", fit.model, flags, gain))
        if not cost.is_own_shape:
            found.append(_entry(f"{layout}: this shape of rank was never measured", fit.model, "", 1 / 3))
        if not cost.is_own_step:
            command = f"twinfer bench steps {fit.model} --layout {layout} --batch-sizes {','.join(map(str, batches))} --context {context}"
            found.append({"reason": f"{layout}: no whole step was measured", "command": command, "gain": 1 / 3})
        elif cost.step_fit.num_runs < _FEW_RUNS:
            found.append(_entry(f"{layout}: {cost.step_fit.num_runs} runs bound the interval", fit.model, "--budget 600", 0.2))
        found += _weak_components(cost, fit.model)
    unique = {entry["reason"]: entry for entry in found}
    return sorted(unique.values(), key=lambda entry: (-entry["gain"], entry["reason"]))[:MAX_SUGGESTIONS]


def _weak_components(cost: CalibratedCost, model: str) -> list[dict[str, Any]]:
    variances = {name: (one.share * one.held_out_median) ** 2 for name, one in cost.rank_fit.components.items()}
    total = sum(variances.values())
    return [
        _entry(f"{cost.layout}: {name} is {value / total:.0%} of the fit's uncertainty", model, "--budget 600", 0.5 * value / total)
        for name, value in variances.items()
        if total > 0 and value / total > _WORTH_SHARE and cost.rank_fit.components[name].held_out_median > 0.03
    ]


def _entry(reason: str, model: str, flags: str, gain: float) -> dict[str, Any]:
    return {"reason": reason, "command": f"twinfer calibrate --model {model} {flags} --out FILE".replace("  ", " "), "gain": gain}
