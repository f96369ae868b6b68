"""Engram's rows from a host's memory: shared rates, what is hidden, and the price of a step with it."""

from __future__ import annotations

import functools
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.contention import HostMemory, gather_seconds, measured_memory, row_bytes, waited_seconds
from calibration.cost_model import CalibratedCost, ModelFit, PricedTable
from calibration.features import uniform_steps
from engine.core.errors import ConfigError
from engine.core.layout import parse_layout
from engine.core.specs import V41Spec
from engine.model.files import read_model_files
from tests.calibration import synthetic

bytes_of = st.lists(st.floats(0, 1e12), min_size=1, max_size=12)
memory_of = st.builds(HostMemory, st.floats(1e3, 1e12), st.floats(1e3, 1e12))


def seconds(ranks: list[float], per_host: int, memory: HostMemory) -> float:
    return float(gather_seconds(np.array([ranks]), per_host, memory)[0])


@given(bytes_of, st.integers(1, 12), memory_of)
def test_a_host_gives_out_no_more_than_it_has(ranks: list[float], per_host: int, memory: HostMemory) -> None:
    """Said again host by host."""
    hosts = [ranks[begin : begin + per_host] for begin in range(0, len(ranks), per_host)]
    wanted = max(max(max(host) / memory.rank_bytes_per_s, sum(host) / memory.host_bytes_per_s) for host in hosts)
    assert seconds(ranks, per_host, memory) == pytest.approx(wanted)


@given(st.floats(0, 1e12), st.integers(1, 12), memory_of)
def test_alike_ranks_wait_longer_the_more_share_a_host(each: float, ranks: int, memory: HostMemory) -> None:
    found = [seconds([each] * ranks, per_host, memory) for per_host in range(1, ranks + 1)]
    assert all(one <= two * (1 + 1e-12) for one, two in itertools.pairwise(found))
    assert found[-1] <= max(1.0, ranks * memory.rank_bytes_per_s / memory.host_bytes_per_s) * each / memory.rank_bytes_per_s * (1 + 1e-9)


@given(bytes_of, bytes_of, st.integers(1, 12), memory_of)
def test_more_bytes_take_longer(ranks: list[float], more: list[float], per_host: int, memory: HostMemory) -> None:
    both = [one + (more[index] if index < len(more) else 0.0) for index, one in enumerate(ranks)]
    assert 0.0 <= seconds(ranks, per_host, memory) <= seconds(both, per_host, memory)


def test_a_rate_is_of_a_rank_until_the_host_has_no_more() -> None:
    memory = HostMemory(10.0, 25.0)
    assert [seconds([100.0] * count, 8, memory) for count in (1, 2, 3, 5)] == pytest.approx([10.0, 10.0, 12.0, 20.0])
    assert seconds([100.0] * 16, 2, memory) == pytest.approx(10.0)


def test_the_layers_before_hide_what_they_can() -> None:
    assert waited_seconds(np.array([3.0, 1.0]), np.array([2.0, 2.0])).tolist() == [1.0, 0.0]


def test_measured_rates_make_a_memory() -> None:
    assert measured_memory({1: 8.0, 2: 7.0, 4: 4.0}) == HostMemory(8.0, 16.0, 4)
    memory = measured_memory({1: 8.0, 2: 7.0, 4: 4.0})
    assert (memory.provenance(4), memory.provenance(8), HostMemory(1.0, 1.0).provenance(1)) == ("measured", "scaled", "roofline")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="host_bytes_per_s"):
        HostMemory(1.0, rate)
    with pytest.raises(ConfigError, match="ranks per host are 0"):
        gather_seconds(np.ones((1, 1)), 0, HostMemory(1.0, 1.0))


def test_rows_of_a_token_have_the_bytes_of_the_tables() -> None:
    spec = read_model_files("tiny-v41").spec
    assert isinstance(spec, V41Spec)
    assert spec.engram is not None
    assert row_bytes(spec, 2) == 2 * 2 * 12 * 32  # layers, bytes, columns, width
    assert row_bytes(msgspec.structs.replace(spec, engram=None), 2) == 0


# --- in the price of a step ------------------------------------------------------------------------------------------------------


@functools.cache
def truth() -> ModelFit:
    return synthetic.true_fit(synthetic.tiny())


def priced(layout: str, batch: float, engram: str = "host", memory: HostMemory | None = None, per_host: int | None = None) -> PricedTable:
    spec, unit = synthetic.tiny(), parse_layout(layout).decode.unit
    cost = CalibratedCost(truth(), spec, unit, engram=engram, host_memory=memory, ranks_per_host=per_host)  # type: ignore[arg-type]
    ones = np.ones((1, unit.dp))
    return cost.price_table(uniform_steps(spec, batch * ones, 100 * ones, ones))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(("tp1dp1ep1", "tp1dp2ep2", "tp2dp1ep1", "tp1dp8ep8")), st.integers(1, 64), st.floats(1e3, 1e12), st.floats(1e3, 1e12)
)
def test_steps_grow_with_ranks_per_host(layout: str, batch: int, rank: float, host: float) -> None:
    found = [float(priced(layout, batch, "host", HostMemory(rank, host), per_host).step_s[0]) for per_host in (1, 2, 4, 8)]
    assert found == sorted(found)
    without = [float(priced(layout, batch, "host", None, per_host).step_s[0]) for per_host in (1, 2, 4, 8)]
    assert without == sorted(without)


def test_a_slow_host_is_waited_for_and_a_fast_one_is_not() -> None:
    fast, slow = (priced("tp1dp1ep1", 64, memory=HostMemory(rate, rate)) for rate in (1e15, 1e6))
    more = 64 * row_bytes(synthetic.tiny(), 4) / 1e6  # type: ignore[arg-type]
    # The rest of the gathering went on beside the first layer (of eight).
    inside = sum(
        float(part[0]) for name, part in fast.components.items() if name not in ("lm_head", "sampler", "other", "engram.fetch", "host_gap")
    )
    assert slow.components["engram.fetch"][0] - fast.components["engram.fetch"][0] == pytest.approx(more - inside / 8)
    assert slow.provenance["engram.fetch"] == "roofline"


def test_a_rank_with_one_core_has_nothing_to_hide_behind() -> None:
    fast, slow = (priced("tp1dp2ep2", 64, memory=HostMemory(rate, rate)) for rate in (1e15, 1e9))
    more = 2 * 64 * row_bytes(synthetic.tiny(), 4) / 1e9  # type: ignore[arg-type]
    assert slow.components["engram.fetch"][0] - fast.components["engram.fetch"][0] == pytest.approx(more, rel=1e-5)


def test_unknown_memory_is_that_of_tables_at_home() -> None:
    home, host = priced("tp1dp1ep1", 8, "replicated"), priced("tp1dp1ep1", 8)
    assert host.step_s == pytest.approx(home.step_s)
    crowded = priced("tp1dp8ep8", 8, per_host=8)
    assert crowded.components["engram.fetch"][0] == pytest.approx(4 * priced("tp1dp8ep8", 8, per_host=2).components["engram.fetch"][0])
    assert crowded.provenance["engram.fetch"] == "scaled"
    assert set(crowded.components) >= {"dispatch", "combine"}


def test_a_measured_memory_is_the_fits() -> None:
    spec, measured = synthetic.tiny(), measured_memory({1: 1e6, 2: 6e5})
    fit = msgspec.structs.replace(truth(), host_memory=measured)
    cost = CalibratedCost(fit, spec, parse_layout("tp1dp2ep2").decode.unit, engram="host", host_memory=HostMemory(1e12, 1e12))
    assert cost.host_memory == measured
    one = np.ones((1, 2))
    assert cost.price_table(uniform_steps(spec, one, one, one)).provenance["engram.fetch"] == "measured"
