"""One data-parallel rank's memory: device blocks, prefix tree, window tails, slots, and host memory for swapped requests."""

from __future__ import annotations

from engine.core.block_pool import BlockPool
from engine.core.errors import InvariantError
from engine.core.policies import EVICTION_POLICIES
from engine.core.prefix_tree import Match, Node, PrefixTree
from engine.core.request import Sequence
from engine.core.scheduler_config import SchedulerConfig
from engine.core.states import State
from engine.core.steady import MIN_PLANS, SteadyDecode
from engine.core.tail_pool import TailPool


class RankState:
    """``running`` is in order of admission. ``fork_sources`` are sequences whose prompt has been planned to its end and whose other samples
    fork in the next plan; one that finished in between is still here, with its slot and blocks, and nowhere else."""

    def __init__(self, rank: int, config: SchedulerConfig) -> None:
        cache = config.cache
        self.rank = rank
        self.block_size = cache.block_size
        self.prefix_caching = config.prefix_caching
        self.pool = BlockPool(cache.num_blocks)
        self.tails = TailPool(cache.num_tails) if config.has_sequence_state else None
        self.saves_tails = config.has_sequence_state and cache.num_tails > 0 and config.prefix_caching
        self.tree = PrefixTree(self.pool, cache.block_size, EVICTION_POLICIES[config.eviction_policy], self.tails)
        self.host_pool = BlockPool(cache.num_host_blocks)
        self.num_host_states = cache.num_host_states if config.has_sequence_state else 0
        self.free_host_states = list(range(self.num_host_states - 1, -1, -1))
        self.num_slots = cache.max_running
        self.free_slots = list(range(cache.max_running - 1, -1, -1))
        self.running: list[Sequence] = []
        self.fork_sources: list[Sequence] = []
        self.steady: SteadyDecode | None = None
        self._decoded: list[Sequence] = []  # by the plan before, where that is all it did
        self._num_alike = 0  # plans before that one which decoded the same
        default_watermark = max(1, cache.num_blocks // 100)
        self._watermark = default_watermark if config.watermark_blocks is None else config.watermark_blocks

    # --- blocks ----------------------------------------------------------------------------------------------------------

    @property
    def num_allocatable(self) -> int:
        return self.pool.num_free + self.tree.num_evictable_blocks

    @property
    def watermark_blocks(self) -> int:
        """What an admission leaves for the growth of those that run; an empty rank keeps nothing back, so that the largest request fits."""
        return self._watermark if self.running else 0

    @property
    def num_held_tokens(self) -> int:
        if self.steady is None:
            return sum(sequence.num_expected for sequence in self.running)
        others = self.running[len(self.steady.sequences) :]
        return self.steady.num_held_tokens + sum(sequence.num_expected for sequence in others)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """All or nothing, evicting cached blocks only where that is enough."""
        short = count - self.pool.num_free
        if short > 0:
            if short > self.tree.num_evictable_blocks:
                return None
            self.tree.evict(short)
        return self.pool.allocate(count)

    def match(self, sequence: Sequence) -> Match:
        """The prefix hit of all known tokens, ending before the newest: at least one token is always computed."""
        if not self.prefix_caching:
            return Match(sequence.namespace, 0, [], None)
        max_blocks = (len(sequence.tokens) - 1) // self.block_size
        tokens = sequence.token_bytes(0, max_blocks, self.block_size)
        return self.tree.match(sequence.namespace, tokens, max_blocks, need_tail=self.tails is not None)

    def take_blocks(self, sequence: Sequence, match: Match, num_blocks: int) -> bool:
        """Give ``sequence`` the matched blocks and fresh ones up to ``num_blocks``; False, and nothing taken, where they do not fit."""
        fresh = num_blocks - match.num_blocks
        # Matched blocks that nobody uses count as evictable now and will not after the lock.
        reviving = sum(count for node, count in match.path if node.locks == 0)
        if fresh + reviving + self.watermark_blocks > self.num_allocatable:
            return False
        hit = match.blocks()  # before the lock: it may split the last node
        self.pool.share(hit)
        if self.prefix_caching:
            sequence.lock_node = self.tree.lock_match(match, sequence.priority)
            sequence.num_locked_blocks = match.num_blocks
        blocks = self.allocate(fresh)
        if blocks is None:
            raise InvariantError(f"{fresh} blocks were counted as allocatable and are not")
        sequence.blocks = hit + blocks
        return True

    def release(self, sequence: Sequence) -> None:
        """Everything ``sequence`` holds on the device. Uncommitted plans may still write to it: they run before any plan that is made
        from now on, so whatever gets these ids next is written after them."""
        self._unlock(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self.free_slots.append(sequence.slot)

    def release_host(self, sequence: Sequence) -> None:
        self.host_pool.release(sequence.host_blocks)
        sequence.host_blocks = []
        if sequence.host_state is not None:
            self.free_host_states.append(sequence.host_state)
            sequence.host_state = None

    def _unlock(self, sequence: Sequence) -> None:
        if sequence.lock_node is not None:
            self.tree.unlock(sequence.lock_node)
        sequence.lock_node = None
        sequence.num_locked_blocks = 0

    # --- steady decode ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before anybody reads or changes the counts or tokens of a running sequence."""
        if self.steady is not None:
            self.steady.settle()
            self.steady = None

    def steady_for_plan(self) -> SteadyDecode | None:
        """What the next plan goes on with, or begins; None, with all settled, where it is not known to be plain decode."""
        steady = self.steady
        if steady is not None:
            if len(steady.sequences) == len(self.running) and steady.num_planned < steady.max_plans:
                return steady
            self.settle()
        elif self._num_alike >= MIN_PLANS - 1 and self._decoded == self.running and not self.fork_sources:
            steady = SteadyDecode(self.running, self.block_size)
            self._num_alike = 0
            if steady.max_plans >= MIN_PLANS:
                self.steady = steady
        return self.steady

    def decoded(self, sequences: list[Sequence]) -> None:
        """A plan decodes these, one token each, or does not only that and says none."""
        if not sequences or self.saves_tails:
            self._decoded, self._num_alike = [], 0
        elif sequences == self._decoded:
            self._num_alike += 1
        else:
            self._decoded, self._num_alike = list(sequences), 0

    # --- prefix tree -----------------------------------------------------------------------------------------------------

    def insert_computed(self, sequence: Sequence) -> None:
        """Make the full blocks of committed tokens findable. No plan, committed or not, ever writes below ``num_computed``."""
        first, end = sequence.num_locked_blocks, sequence.num_computed // self.block_size
        if sequence.lock_node is None or end <= first:
            return
        key = sequence.token_bytes(first, end, self.block_size)
        node = self.tree.insert(sequence.lock_node, key, sequence.blocks[first:end], sequence.priority)
        self.relock(sequence, node, end)

    def relock(self, sequence: Sequence, node: Node, num_blocks: int) -> None:
        """Move the lock down to ``node``, ``num_blocks`` from the root: first the new one, so that nothing is unlocked in between."""
        self.tree.lock(node)
        if sequence.lock_node is not None:
            self.tree.unlock(sequence.lock_node)
        sequence.lock_node, sequence.num_locked_blocks = node, num_blocks

    def take_tails(self, boundaries: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int, int]]:
        """Ids for tails to be saved, as (sequence, position, tail), as far as there are any."""
        saves: list[tuple[Sequence, int, int]] = []
        for sequence, position in boundaries:
            tail = self.tails.take() if self.tails is not None else None
            if tail is None:
                break
            saves.append((sequence, position, tail))
        return saves

    def attach_tail(self, sequence: Sequence, position: int, tail: int) -> None:
        """A committed TailSave: usable from now on if the boundary's blocks are in the tree, else the id is free again.

        The window rows depend on the tokens before ``position`` only, so it does not matter whose blocks the tree has there, nor whether
        ``sequence`` still runs; but all those tokens must be known.
        """
        assert self.tails is not None
        boundary = position // self.block_size
        if sequence.state is State.RUNNING:
            self.insert_computed(sequence)
        if sequence.lock_node is not None and boundary <= sequence.num_locked_blocks:
            node, end = sequence.lock_node, sequence.num_locked_blocks
            while node.parent is not None and boundary <= end - len(node.blocks):
                end -= len(node.blocks)
                node = node.parent
            self.tails.attach(tail, node, boundary - (end - len(node.blocks)))
        elif position <= len(sequence.tokens):
            match = self.tree.match(sequence.namespace, sequence.token_bytes(0, boundary, self.block_size), boundary)
            if match.num_blocks == boundary:
                self.tails.attach(tail, *match.path[-1])
            else:
                self.tails.release(tail)
        else:
            self.tails.release(tail)

    # --- conservation ----------------------------------------------------------------------------------------------------

    def check(self, swapped: list[Sequence]) -> None:
        """Every block, slot and host place is held by exactly who says so; raises InvariantError."""
        live = [*self.running, *(source for source in self.fork_sources if source.state is State.FINISHED)]
        holders: dict[int, int] = {}
        for blocks in [*(sequence.blocks for sequence in live), *(node.blocks for node in self.tree.nodes())]:
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        self.pool.check(holders)
        self.tree.check()
        self.host_pool.check({block: 1 for sequence in swapped for block in sequence.host_blocks})
        states = [*self.free_host_states, *(seq.host_state for seq in swapped if seq.host_state is not None)]
        if sorted(states) != list(range(self.num_host_states)):
            raise InvariantError(f"rank {self.rank}: host states {sorted(states)} are not 0..{self.num_host_states - 1}, each once")
        slots = sorted([*self.free_slots, *(sequence.slot for sequence in live)])
        if slots != list(range(self.num_slots)):
            raise InvariantError(f"rank {self.rank}: slots {slots} are not 0..{self.num_slots - 1}, each once")
        for sequence in live:
            if len(sequence.blocks) * self.block_size < sequence.num_planned:
                raise InvariantError(f"request {sequence.id}: {len(sequence.blocks)} blocks cannot hold {sequence.num_planned} tokens")
            if not sequence.num_computed <= sequence.num_planned <= sequence.num_expected:
                raise InvariantError(f"request {sequence.id}: computed, planned and expected tokens are out of order")
