"""Request: what a client asks for. Sequence: what the scheduler knows of it while it lives."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as Seq

import msgspec

from engine.core.plan import RequestId
from engine.core.prefix_tree import Namespace, Node
from engine.core.sampling import SamplingParams
from engine.core.states import State, Transition, next_state


class Request(msgspec.Struct, frozen=True):
    """One prompt. ``sample_ids`` for n > 1 samples: n ids, the first of which is ``id``; each sample lives and finishes on its own.

    ``priority``: lower is more urgent. ``cache_salt`` and ``adapter`` are kept apart in the prefix cache: KV is shared only where both
    are equal.
    """

    id: RequestId
    prompt: Seq[int]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    sample_ids: tuple[RequestId, ...] = ()
    cache_salt: str | None = None
    adapter: str | None = None

    @property
    def namespace(self) -> Namespace:
        """A tagged tuple, so that a salt "x" is not an adapter "x"."""
        tagged = (("salt", self.cache_salt), ("adapter", self.adapter))
        return tuple((tag, value) for tag, value in tagged if value is not None)


MAX_TOKEN_ID = 2**31 - 1
_SIGN_BYTE = 3 if sys.byteorder == "little" else 0  # of four


def are_token_ids(prompt: Seq[int]) -> bool:
    """All from 0 to MAX_TOKEN_ID; ``prompt`` has one at least."""
    if isinstance(prompt, array) and prompt.typecode == "i":
        return prompt.tobytes()[_SIGN_BYTE::4].isascii()  # no sign is set
    return min(prompt) >= 0 and max(prompt) <= MAX_TOKEN_ID


class Sequence:
    """One sample of a request inside the scheduler.

    Token positions, with ``tokens`` the prompt and all *committed* output:

        0 ........ num_computed ........ num_planned ........ num_expected
        |  KV is in cache   |  KV is being written  |  known or about to be sampled, not planned yet
                               by uncommitted plans

    num_expected = len(tokens) + tokens that uncommitted plans will emit. The newest token has no KV, so a decoding sequence has
    num_planned == num_expected - 1. There is no other notion of prefill and decode.
    """

    __slots__ = (
        "blocks", "cached_tokens_first", "children", "deferred_build", "deferred_step", "failed", "host_blocks", "host_state", "id",
        "limit", "lock_node", "min_tokens_end", "namespace", "num_computed", "num_expected", "num_locked_blocks", "num_passes",
        "num_planned", "num_preemptions", "num_prompt", "parent", "priority", "prompt_build", "rank", "reserved_rank",
        "sequence_number", "slot", "started", "state", "stop_ids", "target", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, sample: RequestId, sequence_number: int, limit: int, eos_token_ids: tuple[int, ...]) -> None:
        params = request.params
        self.id = sample
        self.sequence_number = sequence_number
        self.priority = request.priority
        self.namespace = request.namespace
        self.state = State.WAITING
        self.failed = False  # an item of it could not be sampled: what it computed is in doubt
        self.tokens = array("i", request.prompt)
        self.num_prompt = len(request.prompt)
        self.limit = limit  # len(tokens) at which it ends by length
        self.min_tokens_end = self.num_prompt + params.min_tokens
        self.stop_ids = frozenset(params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids))
        self.parent: RequestId | None = None
        self.children: list[Sequence] = []  # samples to fork once the prompt is computed
        self.started = False
        self.cached_tokens_first = 0  # of the first admission; later ones do not count again
        self.num_preemptions = 0
        self.num_passes = 0  # later arrivals that were admitted before this one
        self.reserved_rank: int | None = None  # the rank kept free for it once it has been passed too often
        self.deferred_build: int | None = None  # the build of a plan that preempted it: the same build does not admit it again
        # On a rank (kept after a preemption: the worker there knows the tokens).
        self.rank: int | None = None
        self.slot = 0
        self.blocks: list[int] = []
        self.lock_node: Node | None = None
        self.num_locked_blocks = 0  # blocks on the tree's path to lock_node
        self.num_computed = 0
        self.num_planned = 0
        self.num_expected = self.num_prompt
        self.target = self.num_prompt  # tokens known when it was last started: up to here it is "prompt", computed in chunks
        self.deferred_step: int | None = None  # plans before this step may still compute it: it is not admitted before they commit
        self.prompt_build: int | None = None  # the build of the plan that computes the end of the prompt
        # In host memory.
        self.host_blocks: list[int] = []
        self.host_state: int | None = None

    def move(self, transition: Transition) -> None:
        self.state = next_state(self.state, transition)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def token_bytes(self, first_block: int, end_block: int, block_size: int) -> bytes:
        """The tree's key of blocks [first_block, end_block)."""
        return self.tokens[first_block * block_size : end_block * block_size].tobytes()
