"""What the requests in a rank's slots ask of the sampler: parameters as per-slot tensors, so that a step reads them with one
index_select and no loop over requests. Owned by ``sampler.Sampler``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from engine.core.sampling import SamplingParams


class Uses(IntFlag):
    """Features a slot's request uses."""

    SAMPLING = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64
    LOGPROBS = 128
    GRAMMAR = 256


# Columns of ``real_SF`` and of ``int_SF``.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
SEED, OUTPUT_LEN, TOP_K, MIN_TOKENS, PENALTY_ROW = range(5)


class SlotParameters:
    """``start`` fills a slot, ``release`` empties it, ``advance`` follows what was emitted.

    S slots, F columns, N penalty rows, V vocabulary. ``uses_S`` and ``num_logprobs_S`` are on the host.
    """

    def __init__(self, vocab_size: int, max_running: int, device: torch.device, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self.real_SF = torch.zeros((max_running, 6), dtype=torch.float32, device=device)
        self.int_SF = torch.zeros((max_running, 5), dtype=torch.int64, device=device)
        self.uses_S = np.zeros(max_running, dtype=np.uint16)
        self.num_logprobs_S = np.zeros(max_running, dtype=np.int64)
        self._steps_to_min_tokens_S = np.zeros(max_running, dtype=np.int64)
        # Counts of a whole vocabulary exist only for requests with penalties; row 0 stays all zero, for everybody else.
        self.prompt_seen_NV = torch.zeros((1, vocab_size), dtype=torch.bool, device=device)
        self.output_counts_NV = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._free_penalty_rows: list[int] = []
        self._penalty_row_of_slot: dict[int, int] = {}
        self.bias = SparseRows(max_running, vocab_size, device)
        self.stops = SparseRows(max_running, vocab_size, device)

    def start(self, slot: int, params: SamplingParams, seed: int, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> None:
        """Put a request into ``slot``; its next draw is that of output position ``len(output_tokens)``."""
        self.release(slot)
        stops = tuple(params.stop_token_ids) + (() if params.ignore_eos else self._eos_token_ids)
        uses = _uses(params, may_be_closed=bool(stops) and len(output_tokens) < params.min_tokens)
        self.uses_S[slot] = int(uses)
        self.num_logprobs_S[slot] = params.logprobs or 0
        self._steps_to_min_tokens_S[slot] = params.min_tokens - len(output_tokens)
        if Uses.BIAS in uses:
            # An id named twice counts twice, as in the sum the client wrote.
            self.bias.set(slot, [token for token, _ in params.logit_bias], [bias for _, bias in params.logit_bias])
        if Uses.MIN_TOKENS in uses:
            self.stops.set(slot, sorted(set(stops)), [-torch.inf] * len(set(stops)))
        penalty_row = self._new_penalty_row(slot, prompt_tokens, output_tokens) if Uses.PENALTIES in uses else 0
        self.real_SF[slot] = torch.tensor(
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ]
        )
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        self.int_SF[slot] = torch.tensor([seed, len(output_tokens), top_k, params.min_tokens, penalty_row])

    def release(self, slot: int) -> None:
        row = self._penalty_row_of_slot.pop(slot, None)
        if row is not None:
            self._free_penalty_rows.append(row)
        self.uses_S[slot] = 0

    def advance(self, slots: list[int], slots_I: Tensor, tokens_IK: Tensor, counts_I: Tensor) -> None:
        """Item i has emitted the first ``counts_I[i]`` of its tokens (none where it failed)."""
        uses_I = self.uses_S[slots]
        self.int_SF[slots_I, OUTPUT_LEN] += counts_I
        if (uses_I & Uses.PENALTIES).any():
            row_I = self.int_SF[slots_I, PENALTY_ROW]
            emitted_IK = torch.arange(tokens_IK.shape[1], device=self._device) < counts_I.unsqueeze(1)
            emitted_IK &= row_I.unsqueeze(1) > 0  # row 0 is everybody without penalties
            cells = (row_I.unsqueeze(1) * self._vocab_size + tokens_IK).flatten()
            self.output_counts_NV.view(-1).index_add_(0, cells, emitted_IK.flatten().to(torch.int32))
        if (uses_I & Uses.MIN_TOKENS).any():
            # At least one token came; when min_tokens steps are over the mask cannot apply any more.
            closed = np.asarray(slots)[(uses_I & Uses.MIN_TOKENS) != 0]
            self._steps_to_min_tokens_S[closed] -= 1
            self.uses_S[closed[self._steps_to_min_tokens_S[closed] <= 0]] &= 0xFFFF ^ int(Uses.MIN_TOKENS)

    def _new_penalty_row(self, slot: int, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> int:
        if not self._free_penalty_rows:
            held = self.prompt_seen_NV.shape[0]
            self.prompt_seen_NV = torch.cat((self.prompt_seen_NV, torch.zeros_like(self.prompt_seen_NV)))
            self.output_counts_NV = torch.cat((self.output_counts_NV, torch.zeros_like(self.output_counts_NV)))
            self._free_penalty_rows.extend(range(held, 2 * held))
        row = self._free_penalty_rows.pop()
        self._penalty_row_of_slot[slot] = row
        self.prompt_seen_NV[row] = torch.bincount(_ids(prompt_tokens), minlength=self._vocab_size).to(self._device) > 0
        self.output_counts_NV[row] = torch.bincount(_ids(output_tokens), minlength=self._vocab_size).to(self._device, torch.int32)
        return row


class SparseRows:
    """A short list of (token id, value) per slot, padded with (0, 0.0) so that a gather and a scatter-add apply it."""

    def __init__(self, max_running: int, vocab_size: int, device: torch.device) -> None:
        self._ids_SE = torch.zeros((max_running, 0), dtype=torch.int64, device=device)
        self._values_SE = torch.zeros((max_running, 0), dtype=torch.float32, device=device)
        self._vocab_size = vocab_size

    def set(self, slot: int, ids: Sequence[int], values: Sequence[float]) -> None:
        if len(ids) > self._ids_SE.shape[1]:
            extra = (1 << (len(ids) - 1).bit_length()) - self._ids_SE.shape[1]
            self._ids_SE = torch.nn.functional.pad(self._ids_SE, (0, extra))
            self._values_SE = torch.nn.functional.pad(self._values_SE, (0, extra))
        device = self._ids_SE.device
        self._ids_SE[slot] = 0
        self._values_SE[slot] = 0.0
        self._ids_SE[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int64).to(device)
        self._values_SE[slot, : len(ids)] = torch.tensor(values, dtype=torch.float32).to(device)

    def get(self, slots_r: Tensor) -> tuple[Tensor, Tensor]:
        return self._ids_SE[slots_r], self._values_SE[slots_r]


def _uses(params: SamplingParams, *, may_be_closed: bool) -> Uses:
    """``may_be_closed``: there are ends of text that min_tokens still forbids."""
    sampling = params.temperature > 0.0
    uses = Uses(0)
    for used, flag in (
        (sampling, Uses.SAMPLING),
        (sampling and params.top_k > 0, Uses.TOP_K),
        (sampling and params.top_p < 1.0, Uses.TOP_P),
        (sampling and params.min_p > 0.0, Uses.MIN_P),
        ((params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0), Uses.PENALTIES),
        (bool(params.logit_bias), Uses.BIAS),
        (may_be_closed, Uses.MIN_TOKENS),
        (params.logprobs is not None, Uses.LOGPROBS),
        (params.grammar is not None, Uses.GRAMMAR),
    ):
        if used:
            uses |= flag
    return uses


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64).reshape(-1))
