"""The switches of measurements: how many drafts are accepted and which experts are chosen, whatever the model says."""

from __future__ import annotations

import pytest
import torch

from engine.actors.config import EngineConfig, GatewayConfig
from engine.actors.gateway import Generation
from engine.actors.supervisor import open_engine
from engine.config import ENGINE_OPTIONS
from engine.core.errors import ConfigError, RequestError
from engine.core.sampling import SamplingParams
from engine.launch import open_model, plan_launch
from engine.model.build import build_runner
from engine.model.sample import DraftTokens, SampleOutput, SampleRows
from engine.model.sampler import Sampler
from engine.model.v41 import V41Model
from engine.options import resolve
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script

VOCAB, DRAFTS = 16, 3


def rows_for(slots: list[int], num_drafts: list[int]) -> SampleRows:
    drafts = torch.tensor(num_drafts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), (drafts + 1).cumsum(0)))
    return SampleRows(torch.tensor(slots), drafts, starts, int(drafts.max()), slots)


def verify(sampler: Sampler, slots: list[int], num_drafts: list[int], *, right: bool = False) -> SampleOutput:
    """One verification; the model agrees with all drafts (all of them token 0) or with none."""
    rows = rows_for(slots, num_drafts)
    logits = torch.zeros(int(rows.row_starts_I1[-1]), VOCAB)
    logits[:, 0 if right else 7] = 50.0
    return sampler.sample(logits, rows, DraftTokens(torch.zeros((len(slots), DRAFTS), dtype=torch.int64), None))


def make(mean: float, num_slots: int, temperature: float = 0.0) -> Sampler:
    sampler = Sampler(VOCAB, num_slots, torch.device("cpu"), (), mean)
    for slot in range(num_slots):
        sampler.start(slot, SamplingParams(temperature=temperature), 1000 + slot, [1, 2], [])
    return sampler


@pytest.mark.parametrize("mean", [0.0, 0.4, 2.0, 2.25, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("right", [False, True])
def test_forced_acceptance_has_its_mean_whatever_the_model_says(mean: float, temperature: float, right: bool) -> None:
    num_slots, num_steps = 400, 10
    sampler = make(mean, num_slots, temperature)
    accepted = torch.zeros(num_slots)
    for _ in range(num_steps):
        output = verify(sampler, list(range(num_slots)), [DRAFTS] * num_slots, right=right)
        accepted += output.counts_I - 1
        assert set((output.counts_I - 1).tolist()) <= {int(mean), int(mean) + (mean % 1 > 0)}
        last = output.tokens_IK.gather(1, output.counts_I[:, None] - 1)
        assert (last == (0 if right else 7)).all()  # the token behind the accepted drafts is the model's own
    # Four standard errors of a Bernoulli's mean.
    assert float(accepted.mean()) / num_steps == pytest.approx(mean, abs=4 * 0.5 / (num_slots * num_steps) ** 0.5)


def test_forced_acceptance_does_not_depend_on_the_batch_and_not_on_missing_drafts() -> None:
    together, alone = make(2.25, 5), make(2.25, 5)
    for _ in range(20):
        every = verify(together, [0, 1, 2, 3, 4], [DRAFTS] * 5).counts_I.tolist()
        for slot in (4, 2, 0):
            assert verify(alone, [slot], [DRAFTS]).counts_I.tolist() == [every[slot]]
    assert (verify(make(2.25, 3), [0, 1, 2], [1, 0, 2]).counts_I - 1).tolist()[:2] == [1, 0]


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("tiny-v41", {"forced_acceptance": 1.0}, "--forced-acceptance is 1 with --draft-tokens 0"),
        ("tiny-v41", {"forced_acceptance": 3.5, "draft_tokens": 3}, "3.5 with --draft-tokens 3; allowed: at most as many as are drafted"),
        ("tiny-v41", {"forced_acceptance": float("nan"), "draft_tokens": 3}, "--forced-acceptance"),
        ("tests/fixtures/qwen3_moe", {"forced_routing": "balanced"}, "not of the family that has this switch"),
    ],
)
def test_what_cannot_be_forced_is_refused(model: str, options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_launch(resolve(ENGINE_OPTIONS, options, {}, None), open_model(model).spec, model)


def launch(**options: object) -> EngineConfig:
    return plan_launch(resolve(ENGINE_OPTIONS, options, {}, None), open_model("tiny-v41").spec, "tiny-v41").config


def test_the_switches_reach_the_model() -> None:
    config = launch(draft_tokens=3, forced_acceptance=2.25, forced_routing="imbalanced", num_threads=1)
    runner = build_runner(config.workers[0])
    assert isinstance(runner.model, V41Model)
    assert runner.sampler._forced_acceptance == 2.25
    assert {layer.moe.routing for layer in runner.model.layers} == {"imbalanced"}
    assert not config.gateway.allows_grammars
    assert launch(draft_tokens=3).gateway.allows_grammars


async def test_structured_output_is_refused() -> None:
    config = engine_config(Script(), gateway=GatewayConfig(allows_grammars=False))
    async with open_engine(config, worker_module=MODULE) as engine:
        with pytest.raises(RequestError, match="structured output is refused: the engine was started with --forced-acceptance"):
            await engine.complete(Generation(prompt=(1,), params=SamplingParams(grammar="{}")))
