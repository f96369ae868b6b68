"""What an engine counted, from a file: how often each expert was chosen, and how many drafts were accepted at each position.

The file is one of

    what GET /metrics of a server answered       (twinfer_expert_tokens_total, twinfer_spec_decode_..._per_position_total)
    what GET /server_info answered               (its ``drafts``)
    {"expert_tokens": [[12, 7, ...], ...]}       JSON: one list a layer with experts, backbone before draft, one count an expert
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from engine.core.acceptance import MAX_DRAFT_TOKENS, acceptance_of_counts, acceptance_probabilities
from engine.core.errors import ConfigError
from engine.reading import read_bytes

MEASURED = "measured:"
MAX_FILE_BYTES = 64 << 20
MAX_LAYERS, MAX_EXPERTS = 1024, 65536
MAX_COUNT = 1 << 53  # what a float64 holds exactly, as /metrics prints it
_SAMPLE = re.compile(rb'twinfer_([a-z_]+)_total\{([a-z]+)="(\d{1,6})"(?:,([a-z]+)="(\d{1,6})")?\} ([0-9.e+]{1,30})')

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Positions = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DRAFT_TOKENS)]
Layers = Annotated[tuple[Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_EXPERTS)], ...], msgspec.Meta(max_length=MAX_LAYERS)]


class DraftsCounted(msgspec.Struct, frozen=True):
    """As ``core.metrics.DraftCounts.summary`` names them."""

    draft_tokens_by_position: Positions = ()
    accepted_tokens_by_position: Positions = ()


class Counted(msgspec.Struct, frozen=True):
    """Everything that such a file may hold; a server's other facts are passed over."""

    expert_tokens: Layers = ()
    drafts: DraftsCounted = DraftsCounted()


def read_counted(path: str | Path) -> Counted:
    """Raises ConfigError for what cannot be read, or is neither of the forms."""
    data = read_bytes(path, MAX_FILE_BYTES)
    if data.lstrip()[:1] != b"{":
        return _of_exposition(data, path)
    try:
        return msgspec.json.decode(data, type=Counted)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}; needed: the answer of /metrics or /server_info, or a list of counts a layer") from None


def read_expert_tokens(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """Raises ConfigError for a file without."""
    counts = read_counted(path).expert_tokens
    if not counts or not all(any(layer) for layer in counts):
        raise ConfigError(
            f"{path}: no tokens of experts are counted in it; serve with --report-steps and spread experts, then save /metrics"
        )
    return counts


def parse_acceptance(text: str, draft_tokens: int) -> tuple[float, ...]:
    """``--acceptance``: a mean, shares by position separated by commas, or measured:FILE. Conditional probabilities of the positions.

    Raises ConfigError, which names the flag.
    """
    try:
        if text.startswith(MEASURED):
            path = text[len(MEASURED) :]
            drafts = read_counted(path).drafts
            shares = acceptance_of_counts(drafts.accepted_tokens_by_position, drafts.draft_tokens_by_position)
            if len(shares) < draft_tokens:
                raise ConfigError(f"{path} counts drafts of {len(shares)} positions, fewer than the draft tokens = {draft_tokens}")
            return acceptance_probabilities(shares[:draft_tokens], draft_tokens)
        parts = [float(part) for part in text.split(",")]
        return acceptance_probabilities(parts[0] if len(parts) == 1 else parts, draft_tokens)
    except ValueError:
        raise ConfigError(f"--acceptance is {text[:80]!r}; needed: a mean, shares by position, or measured:FILE") from None
    except ConfigError as error:
        raise ConfigError(f"--acceptance: {error}") from None


def _of_exposition(data: bytes, path: str | Path) -> Counted:
    """Of the text format of Prometheus. Samples of other metrics are passed over."""
    experts: dict[tuple[int, int], int] = {}
    drafts: dict[str, dict[int, int]] = {"draft": {}, "accepted": {}}
    for line in data.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels = sample[1].decode(), {sample[2]: int(sample[3])}
        if sample[4] is not None:
            labels[sample[4]] = int(sample[5])
        kind = name.removeprefix("spec_decode_").removesuffix("_tokens_per_position")
        if name == "expert_tokens" and set(labels) == {b"layer", b"expert"}:
            experts[labels[b"layer"], labels[b"expert"]] = _count(sample[6], line, path)
        elif name == f"spec_decode_{kind}_tokens_per_position" and kind in drafts and set(labels) == {b"position"}:
            drafts[kind][labels[b"position"]] = _count(sample[6], line, path)
    layers: dict[int, dict[int, int]] = {}
    for (layer, expert), count in experts.items():
        layers.setdefault(layer, {})[expert] = count
    return Counted(
        tuple(_listed(layers[layer], MAX_EXPERTS, path) for layer in _listed({key: key for key in layers}, MAX_LAYERS, path)),
        DraftsCounted(*(_listed(drafts[kind], MAX_DRAFT_TOKENS, path) for kind in ("draft", "accepted"))),
    )


def _count(text: bytes, line: bytes, path: str | Path) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_COUNT or value != int(value):
        raise ConfigError(f"{path}: {line[:120].decode()!r} is no count from 0 to 2^53")
    return int(value)


def _listed(values: dict[int, int], most: int, path: str | Path) -> tuple[int, ...]:
    """Values of the keys 0, 1, 2, ..."""
    if len(values) > most or any(index not in values for index in range(len(values))):
        raise ConfigError(f"{path}: {len(values)} counts are numbered up to {max(values)}; needed: 0, 1, 2, ... up to {most - 1} at most")
    return tuple(values[index] for index in range(len(values)))
