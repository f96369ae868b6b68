"""``core.counts`` against a count of the multiplications that a decode step really does (FlopCounterMode, float32, one sequence)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.core.counts import attention_flops, candidate_rows, gemm_flops
from engine.core.specs import AttentionRole, V41Spec
from engine.model.dense import DenseModel
from engine.model.load import load_model
from tests.model.engine_harness import FIXTURES
from tests.model.test_dense import Driver, Sequence, make
from tests.model.v41_paged import Server, load_case

CONTEXT = 64  # whole blocks, so that no masked key is computed


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def counted(counter: FlopCounterMode) -> int:
    return int(sum(counter.get_flop_counts()["Global"].values()))


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "llama-wide-heads", "qwen3", "qwen3_moe", "qwen3_moe_mixed"])
def test_dense_and_qwen3_moe(name: str) -> None:
    model = load_model(FIXTURES / name, dtype=torch.float32).model if "moe" in name else make(name)[0]
    assert isinstance(model, DenseModel)
    driver, sequence = Driver(model, num_blocks=CONTEXT // 8), Sequence([1] * CONTEXT, list(range(CONTEXT // 8)))
    driver.step([(sequence, CONTEXT - 1)], "none")
    with FlopCounterMode(display=False) as counter:
        driver.step([(sequence, 1)])
    assert counted(counter) == gemm_flops(model.spec).total + attention_flops(model.spec, CONTEXT)


@pytest.mark.parametrize("context", [96, 128])
@pytest.mark.parametrize("name", ["v41_csa2_plain", "v41_engram"])
def test_v41(name: str, context: int) -> None:
    """To the FLOP, with what the published figures leave out, and what this engine does beyond them, added by name."""
    case = load_case(name)
    server = Server(case.model, max_draft=0, num_blocks=context // 8)
    sequence = server.start([5] * context)
    server.step([(sequence, context - 1)], [])
    with FlopCounterMode(display=False) as counter:
        server.step([(sequence, 1)])
    spec = case.spec
    beyond = _sinks(spec) + _stream_mixes(spec) + _index_extras(spec, context)
    assert counted(counter) == gemm_flops(spec).total + attention_flops(spec, context) + beyond
    assert beyond < 0.1 * counted(counter)  # tiny heads: in the released model's sizes it is far less


def _sinks(spec: V41Spec) -> int:
    """The sink is one more key in every layer."""
    return 4 * spec.num_heads * spec.head_dim * spec.num_layers


def _stream_mixes(spec: V41Spec) -> int:
    """Streams to a sublayer's input, and the head's; streams to streams after each."""
    sublayers, streams = 2 * spec.num_layers, spec.hc_mult
    return 2 * streams * spec.hidden_size * (sublayers + 1) + 2 * streams * streams * spec.hidden_size * sublayers


def _index_extras(spec: V41Spec, context: int) -> int:
    """The sum over index heads; and reindexing layers score every row here, and drop those outside the candidate set afterwards."""
    extras = 0
    for layer, ratio in enumerate(spec.compress_ratios):
        if spec.role(layer) not in (AttentionRole.FULL, AttentionRole.REINDEX):
            continue
        rows = context // ratio
        extras += 2 * spec.index_num_heads * rows
        if spec.role(layer) is AttentionRole.REINDEX:
            extras += 2 * spec.index_num_heads * spec.index_head_dim * (rows - min(rows, candidate_rows(spec, layer) or rows))
    return extras
