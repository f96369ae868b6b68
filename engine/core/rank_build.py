"""Building one rank's part of a step: running requests first, then forks; admissions are put in by the scheduler.

The three uses of a block, slot or tail that meet in overlapped plans are safe by these arguments, which the shadow executor in the tests
checks on every plan:

* A worker executes plans, and the orders within one, strictly in order. Whatever is released while a plan P is uncommitted can be handed
  out in the next plan: the new owner's first write comes after the last write of P. So release is immediate and needs no epoch.
* What P still writes for a request that has ended (the token after its last) lands at a position >= num_computed, hence in a block that
  is not full, hence in no block of the tree: only full blocks of committed tokens are inserted.
* A TailSave in P is *pending* until P commits, and is attached only if the request still runs then and the boundary's blocks are in the
  tree; else its id is free again. Nobody can resume from a tail whose window rows were not written by a committed plan.
* Within one plan: swap-outs read before anything is written, so a victim's blocks and slot can be reused in the same plan. What later
  orders read (host blocks of a swap-in, blocks and slot of a finished fork source) is released at the end of the build, because orders
  that come before them (swap-outs, swap-ins) would overwrite it.
"""

from __future__ import annotations

from engine.core.events import Event, Preempted
from engine.core.plan import BlockAppend, BlockCopy, DecodeItems, PlanItem, RankPlan, RequestId, SequenceStart, SwapIn, SwapOut, TailSave
from engine.core.policies import VictimView, victim_newest
from engine.core.prefix_tree import Match
from engine.core.rank import RankState
from engine.core.request import Sequence
from engine.core.scheduler_config import SchedulerConfig
from engine.core.slo_policy import RankLoad, StepLimits
from engine.core.states import State, Transition
from engine.core.steady import SteadyDecode


class RankBuild:
    """Orders and items of one rank in one plan, with the token budget that is left. Lives for one ``Scheduler.plan`` call."""

    def __init__(self, rank: RankState, config: SchedulerConfig, now_s: float, build: int, step: int, events: list[Event]) -> None:
        self.rank = rank
        self.config = config
        self.now_s = now_s
        self.build = build
        self.step = step
        self.events = events
        self.budget = config.cache.max_batched_tokens
        self.chunk = config.chunked_prefill_size or self.budget
        self.withheld = 0  # tokens of the budget that prompts may not take
        self.max_running = config.cache.max_running  # requests up to which new ones are begun
        self.prompts: list[Sequence] = []  # running ones with a chunk to compute
        self.save_tails = rank.saves_tails
        self.items: list[PlanItem] = []
        self.sequences: list[Sequence] = []  # of items, in the same order
        self.num_decodes = 0  # the first items: one token each, no drafts, of requests whose prompt is computed
        self.steady: SteadyDecode | None = None  # whose these are, apart from ``items`` and ``sequences``, in
        self.decodes: DecodeItems | None = None
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.copies: list[BlockCopy] = []
        self.starts: list[SequenceStart] = []
        self.appends: dict[RequestId, BlockAppend] = {}
        self.boundaries: list[tuple[Sequence, int]] = []  # tails to save
        self.pins: list[int] = []
        self.victims: list[Sequence] = []
        self.unforked: list[Sequence] = []
        self.swapped_in: list[Sequence] = []
        self.spent: list[Sequence] = []  # finished fork sources
        self._held_tokens: int | None = None

    # --- running requests --------------------------------------------------------------------------------------------------

    def plan_decodes(self) -> None:
        """One token (and drafts) for each that decodes; those with prompt left to compute are noted."""
        steady = self.rank.steady_for_plan()
        if steady is not None and self._go_on(steady):
            return
        self.rank.settle()
        block_size, running = self.rank.block_size, tuple(self.rank.running)  # a preemption changes the list itself
        save_tails, draft_tokens = self.save_tails, self.config.draft_tokens
        add_item, add_sequence, victims = self.items.append, self.sequences.append, self.victims
        prompts = self.prompts
        draft_budget = self._draft_budget(running) if draft_tokens else 0
        spent_drafts = 0
        for sequence in running:
            position = sequence.num_planned
            if position < sequence.target:
                prompts.append(sequence)
                continue
            if sequence.num_expected >= sequence.limit or (victims and sequence.state is not State.RUNNING):
                continue  # its last token is being sampled (it ends when that commits), or it was just preempted
            num_draft = 0
            if draft_tokens and spent_drafts < draft_budget:
                # With r tokens left to emit at most r - 1 drafts can be accepted beside the target's own token.
                num_draft = min(draft_tokens, sequence.limit - sequence.num_expected - 1, draft_budget - spent_drafts)
            end = position + 1 + num_draft
            if end > len(sequence.blocks) * block_size:
                possible = self._grow(sequence, position, num_draft)
                if possible is None:
                    continue
                num_draft = possible
            add_item(PlanItem(sequence.slot, sequence.id, position, 1 + num_draft, num_draft, True))
            add_sequence(sequence)
            position += 1
            sequence.num_planned = position
            sequence.num_expected += 1
            spent_drafts += num_draft
            if save_tails and position % block_size == 0:
                self.boundaries.append((sequence, position))
        self.budget -= sum(item.num_new_tokens for item in self.items) if draft_tokens else len(self.items)
        self.num_decodes = 0 if draft_tokens else len(self.items)
        self.rank.decoded(self.sequences if self.num_decodes == len(running) else [])

    def _go_on(self, steady: SteadyDecode) -> bool:
        """Plan what ``steady`` has next; False, and nothing done, where blocks are missing."""
        growing = steady.growing()
        if len(growing) > self.rank.num_allocatable:
            return False
        for index in growing:
            self._append_blocks(steady.sequences[index], self.rank.allocate(1) or [])
        self.decodes, self.steady = steady.plan(), steady
        self.num_decodes = len(self.decodes)
        self.budget -= self.num_decodes
        return True

    def limit(self, limits: StepLimits) -> None:
        """Before any prompt chunk: what the running requests leave to prompts and new requests."""
        self.withheld = max(0, self.budget - limits.prompt_tokens)
        self.budget -= self.withheld
        self.max_running = limits.max_running

    def load(self) -> RankLoad:
        """After ``plan_decodes``."""
        if self.decodes is not None:
            context = self.decodes.context_tokens
        else:
            context = sum(item.num_computed_tokens + item.num_new_tokens for item in self.items)
        return RankLoad(self.num_items, context, self.prompts[0].num_planned if self.prompts else None)

    def plan_prompts(self) -> None:
        """Chunks of the prompts that have begun, with what is left of the budget."""
        for sequence in self.prompts:
            if self.budget <= 0:
                break
            if sequence.state is State.RUNNING:
                self.add_chunk(sequence)

    def _draft_budget(self, running: tuple[Sequence, ...]) -> int:
        """Tokens of the step that may go to drafts: after one for each running request, and after half of the rest for waiting prompts."""
        prompt_tokens = sum(sequence.target - sequence.num_planned for sequence in running if sequence.num_planned < sequence.target)
        rest = self.budget - len(running)
        return rest - min(prompt_tokens, rest // 2)

    def add_chunk(self, sequence: Sequence) -> None:
        """The next prompt chunk, within budget and chunk size. Its blocks were allocated at the start."""
        position, target = sequence.num_planned, sequence.target
        count = min(target - position, self.chunk, self.budget)
        end = position + count
        emits = end == target
        self.items.append(PlanItem(sequence.slot, sequence.id, position, count, 0, emits))
        self.sequences.append(sequence)
        self.budget -= count
        sequence.num_planned = end
        if emits:
            sequence.num_expected += 1
            sequence.prompt_build = self.build
            if sequence.children:
                self.rank.fork_sources.append(sequence)
        if self.save_tails:
            # The deepest boundary at which a repetition of this prompt can resume, and the chunk's end if it is a boundary.
            last = (target - 1) // self.rank.block_size * self.rank.block_size
            if position < last < end:
                self.boundaries.append((sequence, last))
            if end % self.rank.block_size == 0:
                self.boundaries.append((sequence, end))

    def _grow(self, sequence: Sequence, position: int, num_draft: int) -> int | None:
        """Blocks for positions [position, position + 1 + drafts), with fewer drafts rather than a preemption. Returns the number of
        drafts, or None where ``sequence`` itself had to go."""
        rank = self.rank
        held = len(sequence.blocks)
        blocks = rank.allocate(rank.blocks_for(position + 1 + num_draft) - held)
        if blocks is None and held * rank.block_size > position:
            return held * rank.block_size - position - 1
        if blocks is None and num_draft:
            num_draft = 0
            blocks = rank.allocate(1)
        while blocks is None:
            victim = self._victim()
            self.preempt(victim)
            if victim is sequence:
                return None
            blocks = rank.allocate(1)
        self._append_blocks(sequence, blocks)
        return num_draft

    def _append_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        self.appends[sequence.id] = BlockAppend(sequence.slot, len(sequence.blocks), tuple(blocks))
        sequence.blocks += blocks

    # --- preemption ----------------------------------------------------------------------------------------------------------

    def _victim(self) -> Sequence:
        """The first by policy of those that may still be preempted. Whoever needs a block is one of them: the others hold all they need."""
        bound = self.config.max_preemptions
        candidates = [sequence for sequence in self.rank.running if sequence.num_preemptions < bound]
        return min(candidates, key=lambda sequence: victim_newest(VictimView(sequence.sequence_number, sequence.priority)))

    def preempt(self, victim: Sequence) -> None:
        """Take everything from ``victim``, its item in this very plan included; its blocks are allocatable afterwards."""
        self._withdraw(victim)
        rank, config = self.rank, self.config
        rank.running.remove(victim)
        self.drop_forks(victim)
        victim.children = []
        rank.fork_sources = [source for source in rank.fork_sources if source is not victim]
        num_computed = victim.num_planned
        threshold = config.swap_threshold_tokens
        swap = threshold is not None and victim.num_planned >= threshold and self._swap_out(victim)
        if not swap:
            rank.insert_computed(victim)  # evictable, hence allocatable; a hit for the victim if it comes back soon
            victim.num_computed = victim.num_planned = 0
            victim.move(Transition.PREEMPT)
        rank.release(victim)
        victim.num_preemptions += 1
        victim.deferred_build, victim.deferred_step = self.build, self.step
        self.victims.append(victim)
        self.events.append(Preempted(self.now_s, victim.id, rank.rank, "swap" if swap else "recompute", num_computed))

    def _withdraw(self, victim: Sequence) -> None:
        """Undo what this build planned for it."""
        self.appends.pop(victim.id, None)
        for index, sequence in enumerate(self.sequences):
            if sequence is victim:
                item = self.items.pop(index)
                del self.sequences[index]
                victim.num_planned = item.num_computed_tokens
                victim.num_expected -= item.emits
                self.boundaries = [entry for entry in self.boundaries if entry[0] is not victim]
                return

    def _swap_out(self, victim: Sequence) -> bool:
        """Order the copy to host memory, of what uncommitted plans compute too: they run before. False without room for all of it."""
        rank = self.rank
        needs_state = rank.tails is not None
        if needs_state and not rank.free_host_states:
            return False
        count = rank.blocks_for(victim.num_planned)
        host_blocks = rank.host_pool.allocate(count)
        if host_blocks is None:
            return False
        victim.host_blocks = host_blocks
        victim.host_state = rank.free_host_states.pop() if needs_state else None
        # A model without per-sequence state has no host states; the order's field is then 0 and means nothing.
        state = 0 if victim.host_state is None else victim.host_state
        self.swap_outs.append(SwapOut(victim.slot, tuple(victim.blocks[:count]), tuple(host_blocks), state))
        victim.move(Transition.SWAP_OUT)
        return True

    @property
    def num_items(self) -> int:
        return len(self.items) + (0 if self.decodes is None else len(self.decodes))

    # --- starts -----------------------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Planned so far."""
        return self.config.cache.max_batched_tokens - self.budget - self.withheld

    @property
    def held_tokens(self) -> int:
        """``rank.num_held_tokens``, for admissions: it is counted anew after each start here, not for every request that asks."""
        if self._held_tokens is None:
            self._held_tokens = self.rank.num_held_tokens
        return self._held_tokens

    def can_start(self) -> bool:
        return self.budget > 0 and bool(self.rank.free_slots)

    def may_begin(self) -> bool:
        """Whether one that has never run may. Others hold a promise: they only wait for what ``can_start`` says."""
        return len(self.rank.running) < self.max_running

    def _blocks_to_start(self, sequence: Sequence) -> int:
        """Blocks for all known tokens; for one that was preempted too often, for all it can ever have, so that it needs no more."""
        if sequence.num_preemptions >= self.config.max_preemptions:
            return self.rank.blocks_for(sequence.limit - 1)
        return self.rank.blocks_for(len(sequence.tokens))

    def start(self, sequence: Sequence) -> Match | None:
        """Admit (or re-admit) by prefix hit or cold, with a first chunk; None, and nothing taken, where blocks are missing."""
        rank, needed = self.rank, self._blocks_to_start(sequence)
        # At best every block in use is part of the hit; a long prompt that does not fit even so is not matched again in every step.
        if needed - (rank.tree.num_blocks - rank.tree.num_evictable_blocks) + rank.watermark_blocks > rank.num_allocatable:
            return None
        match = rank.match(sequence)
        if not rank.take_blocks(sequence, match, needed):
            return None
        hit = match.num_blocks * rank.block_size
        if match.tail is not None and rank.tails is not None:
            rank.tails.pin(match.tail)
            self.pins.append(match.tail)
        self._occupy(sequence, hit)
        self.starts.append(SequenceStart(sequence.slot, sequence.id, hit, tuple(sequence.blocks), tail=match.tail))
        sequence.move(Transition.ADMIT)
        self.add_chunk(sequence)
        return match

    def resume(self, sequence: Sequence) -> bool:
        """Swap back in; False, and nothing taken, where blocks are missing."""
        rank = self.rank
        empty = Match(sequence.namespace, 0, [], None)
        if not rank.take_blocks(sequence, empty, max(self._blocks_to_start(sequence), len(sequence.host_blocks))):
            return False
        self._occupy(sequence, sequence.num_planned)
        self.swap_ins.append(SwapIn(tuple(sequence.host_blocks), tuple(sequence.blocks[: len(sequence.host_blocks)])))
        self.starts.append(
            SequenceStart(sequence.slot, sequence.id, sequence.num_planned, tuple(sequence.blocks), host_state=sequence.host_state)
        )
        self.swapped_in.append(sequence)
        sequence.move(Transition.SWAP_IN)
        self.add_chunk(sequence)
        return True

    def _occupy(self, sequence: Sequence, num_computed: int) -> None:
        sequence.slot = self.rank.free_slots.pop()
        sequence.rank = self.rank.rank
        sequence.num_computed = sequence.num_planned = num_computed
        # Everything known now is computed in chunks and without drafts: the worker has drafts only after a step that emitted here.
        sequence.target = len(sequence.tokens)
        self.rank.running.append(sequence)
        self._held_tokens = None

    # --- forks ------------------------------------------------------------------------------------------------------------------

    def plan_forks(self) -> list[Sequence]:
        """Start the other samples of every prompt that an earlier plan computed to its end; returns those that started.

        This is the first plan after that one, so the source's window still ends at most one token behind the prompt. Samples for which
        there is no slot, block or budget now become ordinary requests (``unforked``).
        """
        started: list[Sequence] = []
        waiting: list[Sequence] = []
        for source in self.rank.fork_sources:
            if source.prompt_build == self.build:
                waiting.append(source)
                continue
            for child in source.children:
                if child.state is State.FORKING and self._fork(source, child):
                    started.append(child)
            self.drop_forks(source)
            if source.state is State.FINISHED:  # it was kept for this only
                self.spent.append(source)
        self.rank.fork_sources = waiting
        return started

    def _fork(self, source: Sequence, child: Sequence) -> bool:
        rank = self.rank
        if not self.can_start():
            return False
        copied = rank.allocate(1)
        if copied is None:
            return False
        # The child computes the prompt's last token again, for logits of its own; it writes that position, so the block is a copy.
        last = (child.num_prompt - 1) // rank.block_size
        rank.pool.share(source.blocks[:last])
        child.blocks = source.blocks[:last] + copied
        if source.lock_node is not None:
            rank.relock(child, source.lock_node, source.num_locked_blocks)
        self._occupy(child, child.num_prompt - 1)
        # Under overlap the plan that computes the end of the prompt may be uncommitted: what it computes is not committed here either.
        child.num_computed = min(child.num_computed, source.num_computed)
        self.copies.append(BlockCopy(source.blocks[last], copied[0]))
        self.starts.append(
            SequenceStart(child.slot, child.id, child.num_prompt - 1, tuple(child.blocks), fork_of_slot=source.slot),
        )
        child.move(Transition.FORK)
        self.add_chunk(child)
        return True

    def drop_forks(self, source: Sequence) -> None:
        """Samples that can no longer fork from ``source`` go to the queue."""
        for child in source.children:
            if child.state is State.FORKING:
                child.move(Transition.UNFORK)
                self.unforked.append(child)
        # Those that forked stay listed until the source's prompt commits: they follow its place in the tree.
        source.children = [child for child in source.children if child.state is State.RUNNING]

    # --- end ----------------------------------------------------------------------------------------------------------------------

    def release_read(self) -> None:
        """Give back what orders of this plan read, now that no other order of it can be told to write there."""
        for source in self.spent:
            self.rank.release(source)
        for sequence in self.swapped_in:
            self.rank.release_host(sequence)

    def finish(self) -> tuple[RankPlan, list[tuple[Sequence, int, int]]]:
        """The rank's plan, and its tail saves as (sequence, position, tail) for the commit."""
        saves = self.rank.take_tails(self.boundaries)
        items: tuple[PlanItem, ...]
        if self.decodes is None or self.steady is None:
            items = tuple(self.items)
        else:
            items = (*self.decodes, *self.items) if self.items else self.decodes
            self.sequences = [*self.steady.sequences, *self.sequences] if self.items else self.steady.sequences
        plan = RankPlan(
            tuple(self.swap_outs),
            tuple(self.swap_ins),
            tuple(self.copies),
            tuple(self.starts),
            tuple(self.appends.values()),
            items,
            tuple(TailSave(sequence.slot, position, tail) for sequence, position, tail in saves),
        )
        return plan, saves
