"""A worker that keeps a shadow of device memory and refuses to read anything but exactly the right content.

Every KV row is a number that depends on *all* tokens up to its position. The worker executes the orders of a plan in the stated order, and
before it computes an item it compares every row the item reads (blocks, window rows) with what the request's own tokens say must be there.
Wrong reuse of a block, slot, tail or host place, under overlap, forks, swaps or speculation, is thus a failed assertion here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.events import Event, Finished, TokensEmitted
from engine.core.plan import ItemResult, PlanItem, RankPlan, RankResult, RequestId, StepPlan, StepResult
from engine.core.rank import RankState
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepCost

Row = tuple[int, int]  # position, content
VOCAB = 50
EOS = 1
MODULUS = (1 << 61) - 1
GARBAGE = -1  # content that no tokens have
FAILURE = "its logits are unusable"


def content(before: int, token: int) -> int:
    return (before * 1_000_003 + token * 7919 + 12345) % MODULUS


def contents(tokens: Seq[int]) -> list[int]:
    rows, value = [], 7
    for token in tokens:
        value = content(value, token)
        rows.append(value)
    return rows


def next_token(last: int) -> int:
    """The "model": a function of the whole prefix. Roughly one token in 30 is the end token."""
    return (last >> 7) % 30 % VOCAB + 1


class Slot:
    def __init__(self) -> None:
        self.request: RequestId | None = None
        self.table: list[int] = []
        self.ring: dict[int, Row] = {}


class RankWorker:
    def __init__(self, config: SchedulerConfig, window: int) -> None:
        cache = config.cache
        self.config, self.window = config, window
        # One row of slack for a fork one token behind its source, and one for each draft that may be rejected.
        self.ring_size = window + max(1, config.draft_tokens)
        self.size = cache.block_size
        self.blocks: list[list[int | None]] = [[None] * self.size for _ in range(cache.num_blocks)]
        self.host_blocks: list[list[int | None]] = [[None] * self.size for _ in range(cache.num_host_blocks)]
        self.host_states: list[dict[int, Row]] = [{} for _ in range(cache.num_host_states)]
        self.tails: dict[int, tuple[int, dict[int, Row]]] = {}
        self.slots = [Slot() for _ in range(cache.max_running)]
        self.tokens: dict[RequestId, list[int]] = {}
        self.failing: set[RequestId] = set()  # shared: who cannot be sampled any more

    def execute(self, plan: RankPlan, accept: int) -> RankResult:
        size = self.size
        for out in plan.swap_outs:
            for block, host in zip(out.blocks, out.host_blocks, strict=True):
                self.host_blocks[host] = list(self.blocks[block])
            if self.config.has_sequence_state:
                self.host_states[out.host_state] = dict(self.slots[out.slot].ring)
        for swap_in in plan.swap_ins:
            for host, block in zip(swap_in.host_blocks, swap_in.blocks, strict=True):
                self.blocks[block] = list(self.host_blocks[host])
        for copy in plan.copies:
            self.blocks[copy.dst] = list(self.blocks[copy.src])
        for start in plan.starts:
            slot = self.slots[start.slot]
            slot.request, slot.table = start.request, list(start.blocks)
            origins = [start.tail, start.fork_of_slot, start.host_state]
            assert sum(origin is not None for origin in origins) <= 1
            if not self.config.has_sequence_state:
                continue
            assert start.num_computed_tokens == 0 or origins != [None] * 3, "a start in the middle without state"
            if start.tail is not None:
                position, rows = self.tails[start.tail]
                assert position == start.num_computed_tokens, "a tail of another boundary"
                slot.ring = dict(rows)
            elif start.fork_of_slot is not None:
                slot.ring = dict(self.slots[start.fork_of_slot].ring)
            elif start.host_state is not None:
                slot.ring = dict(self.host_states[start.host_state])
            else:
                slot.ring = {}
        for append in plan.appends:
            assert append.first_index == len(self.slots[append.slot].table), "block table with a gap"
            self.slots[append.slot].table += append.blocks
        assert len({item.slot for item in plan.items}) == len(plan.items), "two items in one slot"
        assert sum(item.num_new_tokens for item in plan.items) <= self.config.cache.max_batched_tokens
        for save in plan.tail_saves:
            item = next(item for item in plan.items if item.slot == save.slot)
            assert save.position % size == 0
            assert item.num_computed_tokens < save.position <= item.num_computed_tokens + item.num_new_tokens - item.num_draft_tokens
        results = []
        for item in plan.items:
            saves = {save.position: save.tail for save in plan.tail_saves if save.slot == item.slot}
            result = self._compute(item, accept, saves)
            if item.emits:
                assert result is not None
                results.append(result)
        return RankResult(tuple(results))

    def _compute(self, item: PlanItem, accept: int, saves: dict[int, int]) -> ItemResult | None:
        slot, tokens = self.slots[item.slot], self.tokens[item.request]
        assert slot.request == item.request, "an item for a slot that another request has"
        first = item.num_computed_tokens
        end = first + item.num_new_tokens - item.num_draft_tokens
        if item.request in self.failing and item.emits:
            # What it computed is garbage, its window rows too. A plan made before this was known comes here as well.
            for position in range(first, first + item.num_new_tokens):
                self.blocks[slot.table[position // self.size]][position % self.size] = GARBAGE
                slot.ring[position % self.ring_size] = (position, GARBAGE)
                if position + 1 in saves:
                    self.tails[saves[position + 1]] = (position + 1, dict(slot.ring))
            return ItemResult(item.request, (), (), FAILURE)
        assert item.num_new_tokens >= 1
        assert end <= len(tokens), "more tokens planned than are known"
        assert item.emits == (end == len(tokens)), "emits exactly at the newest token"
        truth = contents(tokens)
        for position in range(first):
            block = slot.table[position // self.size]
            assert self.blocks[block][position % self.size] == truth[position], f"request {item.request} reads a wrong row {position}"
        for position in range(first, end):
            self._step(slot, position, truth, saves)
        if not item.emits:
            return None
        new = [next_token(truth[-1])]
        if item.num_draft_tokens:
            # The true continuation, and drafts that agree with it for the first ``accept`` tokens.
            known = list(tokens)
            for _ in range(item.num_draft_tokens):
                known.append(new[-1])
                new.append(next_token(contents(known)[-1]))
            good = min(accept, item.num_draft_tokens)
            drafts = [token if index < good else token + 1 for index, token in enumerate(new[:-1])]
            drafted = contents([*tokens, *drafts])
            for position in range(end, end + item.num_draft_tokens):
                self._step(slot, position, drafted, {})
            new = new[: good + 1]
        tokens += new
        return ItemResult(item.request, tuple(new))

    def _step(self, slot: Slot, position: int, truth: list[int], saves: dict[int, int]) -> None:
        block = slot.table[position // self.size]
        self.blocks[block][position % self.size] = truth[position]
        if not self.config.has_sequence_state:
            return
        for before in range(max(0, position - self.window + 1), position):
            assert slot.ring.get(before % self.ring_size) == (before, truth[before]), f"request {slot.request}: wrong window row {before}"
        slot.ring[position % self.ring_size] = (position, truth[position])
        if position + 1 in saves:
            self.tails[saves[position + 1]] = (position + 1, dict(slot.ring))


class Replica:
    """A scheduler, its workers and what a client would see."""

    def __init__(self, config: SchedulerConfig, window: int = 6, cost: StepCost | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config, cost)
        self.workers = [RankWorker(config, window) for _ in range(config.num_ranks)]
        self.plans: list[StepPlan] = []  # uncommitted
        self.log: list[Event] = []
        self.outputs: dict[RequestId, list[int]] = {}
        self.reasons: dict[RequestId, str] = {}
        self.requests: dict[RequestId, Request] = {}
        self.plan_log: list[StepPlan] = []
        self.now_s = 0.0
        self.failing: set[RequestId] = set()
        for worker in self.workers:
            worker.failing = self.failing

    def submit(self, request: Request) -> None:
        self.see(self.scheduler.submit(request, self.now_s))
        for sample in request.sample_ids or (request.id,):
            self.requests[sample] = request
            self.outputs[sample] = []
            for worker in self.workers:
                worker.tokens[sample] = list(request.prompt)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now_s)
        if plan is not None:
            self.plans.append(plan)
            self.plan_log.append(plan)
        return plan

    def commit(self, accept: int = 0) -> None:
        """Execute and commit the oldest plan; a later one that exists already was made without its result."""
        plan = self.plans.pop(0)
        self.now_s += 1.0
        ranks = tuple(worker.execute(rank, accept) for worker, rank in zip(self.workers, plan.ranks, strict=True))
        self.see(self.scheduler.commit(plan, StepResult(plan.step, ranks, 0.5), self.now_s))

    def see(self, events: Seq[Event]) -> None:
        self.log.extend(events)
        for event in events:
            if isinstance(event, TokensEmitted):
                assert event.request not in self.reasons, "tokens after the end"
                self.outputs[event.request] += event.tokens
            elif isinstance(event, Finished):
                assert event.request not in self.reasons, "finished twice"
                self.reasons[event.request] = event.reason
                if event.message == FAILURE:
                    assert event.request in self.failing
                    assert event.reason == "error"
                assert event.num_output_tokens == len(self.outputs[event.request])

    def doom(self, chosen: RequestId) -> set[RequestId]:
        """Let ``chosen`` fail at its next token. Samples that may go on from what the first one computed then fail with it."""
        wanted = self.requests[chosen]
        samples = wanted.sample_ids or (wanted.id,)
        doomed = {sample for sample in (samples if chosen == wanted.id else (chosen,)) if sample in self.scheduler.sequences}
        self.failing |= doomed
        return doomed

    def abort(self, request: RequestId) -> None:
        self.see(self.scheduler.abort(request, self.now_s))

    def stop(self, request: RequestId) -> None:
        self.see(self.scheduler.stop(request, self.now_s))

    def fail(self) -> None:
        self.plans.clear()
        self.see(self.scheduler.fail_all("worker 0 died", self.now_s))

    def drain(self, accept: int = 0, overlap: bool = False, max_steps: int = 3000) -> None:
        """Run until nothing is alive; every step must lead somewhere."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.plan()
            if overlap:
                self.plan()
            assert self.plans, "nothing planned and nothing to commit"
            self.commit(accept)
            self.scheduler.check()
        raise AssertionError(f"not done after {max_steps} steps: {sorted(self.scheduler.sequences)}")

    def expected_output(self, request: RequestId) -> tuple[list[int], str]:
        """What a lone, cold, unlimited engine would say."""
        wanted = self.requests[request]
        params, tokens = wanted.params, list(wanted.prompt)
        limit = min(len(tokens) + params.max_tokens, self.config.context_tokens)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.config.eos_token_ids)}
        while len(tokens) < limit:
            tokens.append(next_token(contents(tokens)[-1]))
            if tokens[-1] in stops and len(tokens) - len(wanted.prompt) >= params.min_tokens:
                return tokens[len(wanted.prompt) :], "stop"
        return tokens[len(wanted.prompt) :], "length"

    def check_memory(self) -> None:
        """With nothing uncommitted: every block and tail of every tree holds what its tokens say, and nobody leaked."""
        self.scheduler.check()
        if self.plans:
            return
        for worker, rank in zip(self.workers, self.scheduler.ranks, strict=True):
            _check_tree(worker, rank)


def _check_tree(worker: RankWorker, rank: RankState) -> None:
    size = worker.size
    for node in rank.tree.nodes():
        path = [node]
        while path[0].parent is not None and path[0].parent.parent is not None:
            path.insert(0, path[0].parent)
        raw = b"".join(step.key for step in path)
        tokens = [int.from_bytes(raw[index : index + 4], "little") for index in range(0, len(raw), 4)]
        truth = contents(tokens)
        start = len(tokens) - len(node.blocks) * size
        for index, block in enumerate(node.blocks):
            assert worker.blocks[block] == truth[start + index * size : start + (index + 1) * size], "a block of the tree has other content"
        for index, tail in node.tails.items():
            end = start + index * size
            position, rows = worker.tails[tail.id]
            assert position == end
            for before in range(max(0, end - worker.window + 1), end):
                assert rows[before % worker.ring_size] == (before, truth[before]), "a tail with other window rows"
