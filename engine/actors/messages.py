"""Every message between actors: one closed, tagged union per mailbox.

Commands and replies cross a process border as msgpack (ipc.py); the scheduler's mailbox stays inside the parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Union

import msgspec

from engine.actors.config import WorkerConfig
from engine.core.expert_map import ExpertMap
from engine.core.plan import RankPlan, RankResult, RequestId, StepPeers
from engine.core.rank_counters import RankCounters
from engine.core.request import Request
from engine.core.sampling import SamplingParams

if TYPE_CHECKING:  # a worker imports this module and has no use for trio
    from engine.actors.stream import RequestStream

# -- to a worker --------------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load the model and allocate the cache. The first command, sent once."""

    config: WorkerConfig


class Register(msgspec.Struct, frozen=True, tag=True):
    """A request's prompt and parameters; sent before the first plan that starts the request."""

    request: RequestId
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The request is over. Plans sent before this one may still name it."""

    request: RequestId


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A request with this grammar may follow: begin to compile it beside the steps. A hint, which nobody answers."""

    grammar: str


class Execute(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of one StepPlan. ``peers`` says what the others do in it, where the replica has several ranks."""

    step: int
    plan: RankPlan
    peers: StepPeers | None = None
    report_counters: bool = False  # the result is to bring what was counted since one last did
    time_components: bool = False  # the result is to bring the seconds of its components, which slows this step a little


class Rebalance(msgspec.Struct, frozen=True, tag=True):
    """Take up other expert placements before the next step, one a layer: all ranks together."""

    maps: tuple[ExpertMap, ...]


class Record(msgspec.Struct, frozen=True, tag=True):
    """Begin the recording that the configuration describes, with the next step; where it describes none, or one is begun, do nothing."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Free everything and exit with 0."""


WorkerCommand = Union[Start, Register, Forget, Prepare, Execute, Rebalance, Record, Shutdown]

# -- from a worker ------------------------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far the weights are read; any number of them before Ready."""

    done_parameters: int
    total_parameters: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has loaded. Bytes are what it holds on its device, to be compared with the prediction."""

    vocab_size: int
    context_length: int
    weight_bytes: int
    cache_bytes: int
    load_s: float


class Executed(msgspec.Struct, frozen=True, tag=True):
    """One plan is done. ``forward_s`` is the worker's own time from the command to the result; ``components`` (name, seconds) are its
    parts, where the worker was asked to time them."""

    step: int
    result: RankResult
    forward_s: float
    components: tuple[tuple[str, float], ...] = ()
    counters: RankCounters | None = None  # of this rank, where Execute asked


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker is about to exit with a code that is not 0. ``fault`` says whose: the operator's configuration, the program's, or another
    rank's, for which it waited in vain."""

    fault: Literal["config", "internal", "peer"]
    during: str
    message: str
    traceback: str


WorkerReply = Union[Loading, Ready, Executed, Failed]

# -- heartbeat ----------------------------------------------------------------------------------------------------------------


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    number: int


HeartbeatCommand = Ping
HeartbeatReply = Pong

# -- between nodes: the parent of node 0 and those of the others ---------------------------------------------------------------------


class Commands(msgspec.Struct, frozen=True, tag=True):
    """(rank, encoded WorkerCommand), in order. In a Start the node puts its own configuration: paths and cores are a machine's affair."""

    entries: tuple[tuple[int, bytes], ...]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, sent by node 0 and answered with the same."""

    number: int


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Node 0 ends, and with it the replica; ``reason`` is None for an orderly end. Answered with a Goodbye."""

    reason: str | None = None


class Reply(msgspec.Struct, frozen=True, tag=True):
    """What the worker of ``rank`` said."""

    rank: int
    reply: Loading | Ready | Executed


class NodeFailed(msgspec.Struct, frozen=True, tag=True):
    """The node cannot go on. ``worker`` is at fault, None where the node itself is; ``fault`` as in Failed."""

    worker: str | None
    fault: Literal["config", "internal", "peer"]
    message: str


NodeCommand = Union[Commands, Beat, Goodbye]
NodeReply = Union[Reply, Beat, Goodbye, NodeFailed]

# -- a parent and its link process, which carries the messages above to other nodes ----------------------------------------------------


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Find the other nodes: node 0 is at ``host`` and ``port``, and this node listens on its own ``address``. ``facts`` (name, value) must
    be the same on all of them. The first command, sent once."""

    node: int
    num_nodes: int
    host: str
    port: int
    address: str
    facts: tuple[tuple[str, str], ...]
    timeout_s: float


class Post(msgspec.Struct, frozen=True, tag=True):
    """Carry ``payload`` to ``node``."""

    node: int
    payload: bytes


class Met(msgspec.Struct, frozen=True, tag=True):
    """All nodes are there and agree."""


class NotMet(msgspec.Struct, frozen=True, tag=True):
    """They are not or do not; the link process ends."""

    fault: Literal["config", "internal"]
    message: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """``node`` has sent ``payload``."""

    node: int
    payload: bytes


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Nothing comes from ``node`` any more."""

    node: int
    message: str


LinkCommand = Union[Meet, Post]
LinkReply = Union[Met, NotMet, Arrived, Lost]

# -- to the scheduler ---------------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request the gateway has admitted. ``seeds`` are the samples', in the order of ``sample_ids``; outputs go to ``stream``.

    Its times count from ``arrived_s``: the message may lie there for a step, and the client waits all the while.
    """

    request: Request
    seeds: tuple[int, ...]
    stream: RequestStream
    arrived_s: float


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client is gone: free what the sample holds."""

    request: RequestId


SchedulerMessage = Union[Submit, Abort, Record]
