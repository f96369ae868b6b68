"""The runner: one rank's plans on one device.

It owns the model, its KV cache, the sampler and what plans refer to by index: the tokens of each registered request, each
slot's block table and token row, and the drafts made for the next step. ``execute`` turns a RankPlan into one ForwardBatch,
samples, verifies drafts, makes new ones and returns a RankResult.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.errors import InvariantError
from engine.core.expert_map import ExpertMap
from engine.core.plan import ItemResult, PlanItem, RankPlan, RankResult, RequestId, SequenceStart, StepPeers, TokenLogprobs
from engine.core.rank_counters import RankCounters
from engine.core.sampling import SamplingParams
from engine.kernels.timing import ComponentTimer, component, timing
from engine.model.base import DraftRequest, ForwardOutput, Model
from engine.model.batch import ForwardBatch
from engine.model.grammar_state import GrammarSource, GrammarState
from engine.model.sample import DraftTokens, SampleOutput, SampleRows
from engine.model.sampler import Sampler


@dataclass(slots=True)
class _Registered:
    """A request as the worker knows it: prompt and emitted tokens, so that it can be resumed after a preemption."""

    tokens: array[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    grammar: GrammarState | None = None  # from its first start on; None without one


@dataclass(frozen=True, slots=True)
class _DraftProbs:
    """Where the distributions of one slot's drafts are: row ``row`` of a draft round; None for a greedy round."""

    probs_AKV: Tensor | None
    row: int


class Runner:
    """Executes RankPlans strictly in order. Not thread-safe; one per worker process."""

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        *,
        grammars: GrammarSource | None = None,
        time_components: bool = False,
        forced_acceptance: float | None = None,
    ) -> None:
        """``grammars`` is None for a model without a tokenizer: requests with a grammar then fail."""
        self.model = model
        self.config = config
        self.device = model.device
        self.cache = model.new_cache(config)
        self.sampler = Sampler(
            vocab_size=model.spec.vocab_size,
            max_running=config.max_running,
            device=self.device,
            eos_token_ids=model.spec.eos_token_ids,
            forced_acceptance=forced_acceptance,
        )
        self._grammars = grammars
        # Set once logits were unusable: blocks may then hold what made them so, and reading 0 times NaN is NaN.
        self._clears_blocks = False
        self._timer = ComponentTimer(model.device) if time_components else None
        self._last_step = -1
        self._requests: dict[RequestId, _Registered] = {}
        # Sampled and draft tokens are written past the known ones before anybody knows how many stay, hence the slack.
        self._history_SL = torch.zeros((config.max_running, config.context_length + config.max_draft_tokens + 2), dtype=torch.int64)
        self._history_SL = self._history_SL.to(self.device)
        self._block_table_SM = torch.zeros((config.max_running, config.max_blocks_per_sequence + 1), dtype=torch.int64, device=self.device)
        self._num_blocks_S = [0] * config.max_running
        # Drafts outlive the step that made them: a sequence may sit out a step for lack of token budget.
        self._draft_tokens_SK = torch.zeros((config.max_running, max(config.max_draft_tokens, 1)), dtype=torch.int64, device=self.device)
        self._draft_probs_S: list[_DraftProbs | None] = [None] * config.max_running
        self._arange_K = torch.arange(max(config.max_draft_tokens, 1) + 1, device=self.device)

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def weight_bytes(self) -> int:
        return self.model.num_bytes()

    @property
    def cache_bytes(self) -> int:
        return self.cache.num_bytes()

    def close(self) -> None:
        """Nothing outlives the process; the method is where a device would be given back."""
        self._requests.clear()
        if self._grammars is not None:
            self._grammars.close()

    # -- requests ---------------------------------------------------------------------------------------------------------

    def register(self, request: RequestId, tokens: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Make a request's prompt known; it precedes the first plan that starts the request."""
        if request in self._requests:
            raise InvariantError(f"request {request} is registered twice")
        self._requests[request] = _Registered(array("q", tokens), len(tokens), params, seed)

    def prepare(self, grammar: str) -> None:
        """A request with this grammar may come: begin to compile it, in the background."""
        if self._grammars is not None:
            self._grammars.prepare(grammar)

    def forget(self, request: RequestId) -> None:
        """Drop a finished request. Unknown ids are accepted: an abort may overtake the registration."""
        self._requests.pop(request, None)

    # -- a step -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: int, plan: RankPlan, peers: StepPeers | None = None) -> RankResult:
        """Carry out one plan and sample. Raises InvariantError where the plan contradicts what the worker holds.

        ``peers`` is for a replica of several ranks: a rank with nothing to do takes part in what the others do together.
        """
        with timing(self._timer):
            return self._execute(step, plan, peers)

    @component("other")
    def _execute(self, step: int, plan: RankPlan, peers: StepPeers | None) -> RankResult:
        self._carry_out_orders(step, plan)
        result, drafts = RankResult(), False
        if plan.items:
            batch, rows = self._batch(plan)
            output = self.model.forward(batch if peers is None else replace(batch, peers=peers), self.cache)
            if rows is not None:
                result, drafts = self._emit(plan, rows, output, peers), self.config.max_draft_tokens > 0
        elif peers is not None:
            self.model.join(peers)
        if peers is not None and not drafts and self.config.max_draft_tokens and any(peers.num_emitting):
            self.model.join_draft(peers)
        return result

    def time_components(self, timer: ComponentTimer | None) -> ComponentTimer | None:
        """Charge the components of the steps from now on to ``timer``; None times none. Returns the timer before."""
        before, self._timer = self._timer, timer
        return before

    def take_counters(self) -> RankCounters:
        """What was counted since the last call; nothing on a rank that is alone."""
        choices = tuple(tuple(layer) for layer in self.model.take_expert_counts())
        return msgspec.structs.replace(self.model.take_counters(), expert_choices=choices)

    def rebalance(self, maps: Sequence[ExpertMap]) -> None:
        """Take up other expert placements, one a layer, between two steps; a collective of all ranks."""
        self.model.rebalance(maps)

    def take_components(self) -> tuple[tuple[str, float], ...]:
        """Seconds per component since the last call; empty unless ``time_components``."""
        return () if self._timer is None else self._timer.take()

    @torch.inference_mode()
    def logits(self, step: int, plan: RankPlan) -> Tensor:
        """Carry out one plan without sampling: logits [T, V] float32 of every row, for parity checks. No item may hold drafts."""
        self._carry_out_orders(step, plan)
        batch, _ = self._batch(plan)
        every_row = torch.arange(batch.token_ids_T.shape[0], device=self.device)
        return self.model.forward(replace(batch, logit_rows_R=every_row), self.cache).logits_RV

    def append_token(self, slot: int, position: int, token: int) -> None:
        """Dictate a sequence's token instead of sampling it (with ``logits``)."""
        self._history_SL[slot, position] = token

    def _carry_out_orders(self, step: int, plan: RankPlan) -> None:
        """Everything that precedes the forward, in the order of RankPlan's fields."""
        if step <= self._last_step:
            raise InvariantError(f"step {step} arrives after step {self._last_step}; plans are executed in order, once")
        self._last_step = step
        for out in plan.swap_outs:
            self.cache.swap_out(out.slot, list(out.blocks), list(out.host_blocks), out.host_state)
        for swap_in in plan.swap_ins:
            self.cache.swap_in(list(swap_in.host_blocks), list(swap_in.blocks))
        if plan.copies:
            self.cache.copy_blocks([copy.src for copy in plan.copies], [copy.dst for copy in plan.copies])
        if plan.starts:
            self._start(plan.starts)
        for append in plan.appends:
            self._clear(append.blocks)
            self._set_blocks(append.slot, append.first_index, append.blocks)

    def _start(self, starts: tuple[SequenceStart, ...]) -> None:
        reset: list[int] = []
        forks: list[SequenceStart] = []
        tails: list[SequenceStart] = []
        for start in starts:
            record = self._record(start.request)
            self._num_blocks_S[start.slot] = 0
            self._draft_probs_S[start.slot] = None
            self._clear(start.blocks[-(-start.num_computed_tokens // self.config.block_size) :])
            self._set_blocks(start.slot, 0, start.blocks)
            tokens = torch.frombuffer(record.tokens, dtype=torch.int64)
            self._history_SL[start.slot, : tokens.shape[0]] = tokens.to(self.device)
            if record.params.grammar is not None and record.grammar is None:
                record.grammar = self._grammar_state(record.params.grammar)
            prompt, output = record.tokens[: record.prompt_len], record.tokens[record.prompt_len :]
            self.sampler.start(start.slot, record.params, record.seed, prompt, output, record.grammar)
            if start.fork_of_slot is not None:
                forks.append(start)
            elif start.tail is not None:
                tails.append(start)
            elif start.host_state is not None:
                self.cache.restore_state(start.host_state, start.slot)
            else:
                reset.append(start.slot)
        if reset:
            self.cache.reset_state(reset)
        if tails:
            self.cache.load_tails(
                [start.tail for start in tails if start.tail is not None],
                [start.slot for start in tails],
                [start.num_computed_tokens for start in tails],
            )
        if forks:
            self.cache.copy_state(
                [start.fork_of_slot for start in forks if start.fork_of_slot is not None], [start.slot for start in forks]
            )

    def _record(self, request: RequestId) -> _Registered:
        record = self._requests.get(request)
        if record is None:
            raise InvariantError(f"the plan starts request {request}, which was never registered")
        return record

    def _grammar_state(self, grammar: str) -> GrammarState:
        matcher = "the model has no tokenizer to apply a grammar with" if self._grammars is None else self._grammars.take(grammar)
        return GrammarState(matcher, self.model.spec.eos_token_ids)

    def _clear(self, blocks: Sequence[int]) -> None:
        """Fresh blocks, about to be written from their first row on."""
        if self._clears_blocks and blocks:
            self.cache.clear_blocks(list(blocks))

    def _set_blocks(self, slot: int, first_index: int, blocks: tuple[int, ...]) -> None:
        if first_index != self._num_blocks_S[slot]:
            raise InvariantError(f"slot {slot} has {self._num_blocks_S[slot]} blocks; the plan appends at {first_index}")
        if blocks:
            self._block_table_SM[slot, first_index : first_index + len(blocks)] = torch.tensor(blocks, device=self.device)
        self._num_blocks_S[slot] = first_index + len(blocks)

    def _batch(self, plan: RankPlan) -> tuple[ForwardBatch, SampleRows | None]:
        """Pack the plan's items; all per-token index arithmetic is vectorised on the host, then moved once."""
        items = plan.items
        table_I5 = np.array(
            [(item.slot, item.num_computed_tokens, item.num_new_tokens, item.num_draft_tokens, item.emits) for item in items],
            dtype=np.int64,
        )
        slots_B, starts_B, new_B, drafts_B, emits_B = table_I5.T
        query_starts_B1 = np.zeros(len(items) + 1, dtype=np.int64)
        np.cumsum(new_B, out=query_starts_B1[1:])
        num_tokens = int(query_starts_B1[-1])
        max_query_len = int(new_B.max())
        context_lens_B = starts_B + new_B
        if max_query_len == 1:
            seq_of_token_T = np.arange(num_tokens)
            positions_T = starts_B
        else:
            seq_of_token_T = np.repeat(np.arange(len(items)), new_B)
            positions_T = np.arange(num_tokens) - (query_starts_B1[:-1] - starts_B)[seq_of_token_T]
        rows_R, rows = self._sample_rows(slots_B, drafts_B, emits_B.astype(bool), query_starts_B1)
        num_columns = -(-int(context_lens_B.max()) // self.config.block_size)

        slots_on_B = self._to_device(slots_B)
        positions_on_T = self._to_device(positions_T)
        seq_on_T = self._to_device(seq_of_token_T)
        slots_on_T = slots_on_B if max_query_len == 1 else slots_on_B[seq_on_T]
        if drafts_B.any():
            self._write_drafts(items)
        block_table_BM = self._block_table_SM[slots_on_B, :num_columns]
        block_T = block_table_BM[seq_on_T, positions_on_T // self.config.block_size]
        batch = ForwardBatch(
            token_ids_T=self._history_SL[slots_on_T, positions_on_T],
            positions_T=positions_on_T,
            seq_of_token_T=seq_on_T,
            slots_B=slots_on_B,
            query_starts_B1=self._to_device(query_starts_B1),
            context_starts_B=self._to_device(starts_B),
            context_lens_B=self._to_device(context_lens_B),
            block_table_BM=block_table_BM,
            kv_rows_T=block_T * self.config.block_size + positions_on_T % self.config.block_size,
            logit_rows_R=self._to_device(rows_R),
            token_history_SL=self._history_SL,
            tail_saves=_tail_saves(plan),
            num_sequences=len(items),
            max_query_len=max_query_len,
            max_context_len=int(context_lens_B.max()),
        )
        return batch, rows

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _sample_rows(
        self, slots_B: np.ndarray, drafts_B: np.ndarray, emits_B: np.ndarray, query_starts_B1: np.ndarray
    ) -> tuple[np.ndarray, SampleRows | None]:
        """Which packed rows need logits: for an emitting item with d drafts its last 1 + d rows."""
        if not emits_B.any():
            return np.zeros(0, dtype=np.int64), None
        drafts_I = drafts_B[emits_B]
        first_row_I = query_starts_B1[1:][emits_B] - 1 - drafts_I
        row_starts_I1 = np.zeros(len(drafts_I) + 1, dtype=np.int64)
        np.cumsum(drafts_I + 1, out=row_starts_I1[1:])
        item_of_row_R = np.repeat(np.arange(len(drafts_I)), drafts_I + 1)
        rows_R = np.arange(row_starts_I1[-1]) - row_starts_I1[item_of_row_R] + first_row_I[item_of_row_R]
        rows = SampleRows(
            slots_I=self._to_device(slots_B[emits_B]),
            num_drafts_I=self._to_device(drafts_I),
            row_starts_I1=self._to_device(row_starts_I1),
            max_drafts=int(drafts_I.max()),
            slots=slots_B[emits_B].tolist(),
        )
        return rows_R, rows

    def _write_drafts(self, items: tuple[PlanItem, ...]) -> None:
        """Put the drafts to be verified into the token rows, after the last real token of each item."""
        drafting = [item for item in items if item.num_draft_tokens]
        missing = [item.request for item in drafting if self._draft_probs_S[item.slot] is None]
        if missing:
            raise InvariantError(f"the plan verifies drafts of requests {missing[:8]}, which never made any in their present slots")
        slots_A1 = self._to_device(np.array([[item.slot] for item in drafting], dtype=np.int64))
        first_A1 = np.array([[item.num_computed_tokens + item.num_new_tokens - item.num_draft_tokens] for item in drafting], dtype=np.int64)
        columns_AK = self._to_device(first_A1) + self._arange_K[: self._draft_tokens_SK.shape[1]]
        self._history_SL[slots_A1, columns_AK] = self._draft_tokens_SK[slots_A1[:, 0]]

    # -- after the forward ------------------------------------------------------------------------------------------------

    def _emit(self, plan: RankPlan, rows: SampleRows, output: ForwardOutput, peers: StepPeers | None) -> RankResult:
        emitting = [item for item in plan.items if item.emits]
        drafts = self._drafts_of(rows) if rows.max_drafts else None
        sampled = self.sampler.sample(output.logits_RV, rows, drafts)
        self._clears_blocks |= sampled.unusable_logits
        # Position of the first emitted token of each item: right after its last real token.
        base_I = np.array([item.num_computed_tokens + item.num_new_tokens - item.num_draft_tokens for item in emitting], dtype=np.int64)
        base_on_I = self._to_device(base_I)
        width = sampled.tokens_IK.shape[1]
        if width == 1:
            self._history_SL[rows.slots_I, base_on_I] = sampled.tokens_IK[:, 0]
        else:
            self._history_SL[rows.slots_I[:, None], base_on_I[:, None] + self._arange_K[:width]] = sampled.tokens_IK
        if self.config.max_draft_tokens:
            self._make_drafts(rows, sampled, base_on_I, peers)
        return self._result(emitting, sampled)

    def _drafts_of(self, rows: SampleRows) -> DraftTokens:
        """Drafts of the emitting items; items without drafts get whatever stands in their slot, which nobody reads."""
        tokens_IK = self._draft_tokens_SK[rows.slots_I]
        sources = [self._draft_probs_S[slot] for slot in rows.slots]
        probs = [source.probs_AKV for source in sources if source is not None and source.probs_AKV is not None]
        if not probs:
            return DraftTokens(tokens_IK=tokens_IK, probs_IKV=None)
        first = probs[0]
        if all(source is not None and source.probs_AKV is first for source in sources):
            return DraftTokens(tokens_IK=tokens_IK, probs_IKV=first[[source.row for source in sources if source is not None]])
        # Sequences whose drafts come from different rounds; a greedy round is a point mass on its tokens.
        rows_IKV = torch.zeros((len(sources), *first.shape[1:]), dtype=first.dtype, device=self.device)
        rows_IKV.scatter_(2, tokens_IK[..., None], 1.0)
        for index, source in enumerate(sources):
            if source is not None and source.probs_AKV is not None:
                rows_IKV[index] = source.probs_AKV[source.row]
        return DraftTokens(tokens_IK=tokens_IK, probs_IKV=rows_IKV)

    def _make_drafts(self, rows: SampleRows, sampled: SampleOutput, base_I: Tensor, peers: StepPeers | None) -> None:
        last_I = (sampled.counts_I - 1).clamp_min(0)  # an item that failed emitted nothing, and nobody will read its drafts
        tokens_I = sampled.tokens_IK.gather(1, last_I[:, None])[:, 0]
        controls = self.sampler.draft_controls(rows, self.config.max_draft_tokens)
        drafted = self.model.draft(
            DraftRequest(
                slots_A=rows.slots_I,
                tokens_A=tokens_I,
                positions_A=base_I + last_I,
                temperatures_A=controls.temperatures_A,
                top_k_A=controls.top_k_A,
                top_p_A=controls.top_p_A,
                min_p_A=controls.min_p_A,
                uniforms_AK=controls.uniforms_AK,
                num_tokens=self.config.max_draft_tokens,
                all_greedy=controls.all_greedy,
                peers=peers,
            ),
            self.cache,
        )
        self._draft_tokens_SK[rows.slots_I] = drafted.tokens_AK
        for row, slot in enumerate(rows.slots):
            self._draft_probs_S[slot] = _DraftProbs(drafted.probs_AKV, row)

    def _result(self, emitting: list[PlanItem], sampled: SampleOutput) -> RankResult:
        tokens_IK = sampled.tokens_IK.tolist()
        counts_I = sampled.counts_I.tolist()
        results: list[ItemResult] = []
        for index, item in enumerate(emitting):
            if index in sampled.errors:
                results.append(ItemResult(item.request, (), (), sampled.errors[index]))
                continue
            tokens = tuple(tokens_IK[index][: counts_I[index]])
            record = self._requests.get(item.request)
            if record is not None:
                record.tokens.extend(tokens)
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sampled.logprobs is not None and sampled.logprobs[index] is not None:
                logprobs = tuple(sampled.logprobs[index] or ())[: len(tokens)]
            results.append(ItemResult(item.request, tokens, logprobs))
        return RankResult(tuple(results))


def _tail_saves(plan: RankPlan) -> tuple[tuple[int, int, int], ...]:
    if not plan.tail_saves:
        return ()
    index_of_slot = {item.slot: index for index, item in enumerate(plan.items)}
    return tuple((index_of_slot[save.slot], save.position, save.tail) for save in plan.tail_saves)
