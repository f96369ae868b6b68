"""The sampler: from the logits of a step to the tokens each request emits, speculative drafts verified on the way.

Parameters live in per-slot tensors, so a step reads them with one index_select and no loop over requests; what a step does is
decided by the union of its requests' features, known on the host. All-greedy steps are one arg-max.

Order of the transformations: logit bias, repetition / presence / frequency penalties, min_tokens mask, temperature, top-k,
top-p, min-p. Logprobs are of the model's own distribution, before all of them.

Randomness is a hash of (seed, output position, kind of draw), see ``kernels.sampling.uniforms``: what a request draws depends
neither on the batch it shares nor on preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import InvariantError
from engine.core.plan import TokenLogprobs
from engine.core.sampling import SamplingParams
from engine.kernels import sampling as kernels
from engine.kernels.sampling import Draw


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The I emitting items of a step. Item i owns logit rows row_starts[i]:row_starts[i+1]: one after its last real token, one
    after each of its ``num_drafts_I[i]`` drafts. ``slots`` is ``slots_I`` on the host; slots are distinct.
    """

    slots_I: Tensor
    num_drafts_I: Tensor
    row_starts_I1: Tensor
    max_drafts: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """``tokens_IK`` int64 drafts (entries past an item's number of drafts are ignored, K >= max_drafts) and ``probs_IKV``, the
    distribution each was drawn from; None where all are greedy, which counts as a point mass.
    """

    tokens_IK: Tensor
    probs_IKV: Tensor | None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """``tokens_IK`` int64 [I, 1 + max_drafts], of which the first ``counts_I`` are emitted: counts - 1 accepted drafts, then one
    token of the model itself; the rest is 0. ``logprobs[i]`` has one entry per emitted token, None for requests without.
    """

    tokens_IK: Tensor
    counts_I: Tensor
    logprobs: list[list[TokenLogprobs] | None] | None


@dataclass(frozen=True, slots=True)
class DraftControls:
    """What a draft round of the items needs; A = I."""

    temperatures_A: Tensor
    top_k_A: Tensor
    top_p_A: Tensor
    min_p_A: Tensor
    uniforms_AK: Tensor
    all_greedy: bool


class _Uses(IntFlag):
    """Features a slot's request uses."""

    SAMPLING = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64
    LOGPROBS = 128


_ADJUSTS = _Uses.PENALTIES | _Uses.BIAS | _Uses.MIN_TOKENS
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_SEED, _OUTPUT_LEN, _TOP_K, _MIN_TOKENS, _PENALTY_ROW = range(5)


class Sampler:
    """Per-slot sampling state of one rank. ``start`` before a slot's first ``sample``; a later ``start`` replaces the request."""

    def __init__(self, vocab_size: int, max_running: int, device: torch.device, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._real_SF = torch.zeros((max_running, 6), dtype=torch.float32, device=device)
        self._int_SF = torch.zeros((max_running, 5), dtype=torch.int64, device=device)
        self._uses_S = np.zeros(max_running, dtype=np.uint8)
        self._num_logprobs_S = np.zeros(max_running, dtype=np.int64)
        self._steps_to_min_tokens_S = np.zeros(max_running, dtype=np.int64)
        # Counts of a whole vocabulary exist only for requests with penalties; row 0 stays all zero, for everybody else.
        self._prompt_seen_NV = torch.zeros((1, vocab_size), dtype=torch.bool, device=device)
        self._output_counts_NV = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._free_penalty_rows: list[int] = []
        self._penalty_row_of_slot: dict[int, int] = {}
        self._bias = _SparseRows(max_running, vocab_size, device)
        self._stops = _SparseRows(max_running, vocab_size, device)

    # -- requests ---------------------------------------------------------------------------------------------------------

    def start(self, slot: int, params: SamplingParams, seed: int, prompt_tokens: Sequence[int], output_tokens: Sequence[int] = ()) -> None:
        """Put a request into ``slot``: new, resumed after a preemption, or forked (then with a seed of its own).

        Its next draw is that of output position ``len(output_tokens)``.
        """
        self.release(slot)
        stops = tuple(params.stop_token_ids) + (() if params.ignore_eos else self._eos_token_ids)
        uses = _Uses(0)
        for used, flag in (
            (params.temperature > 0.0, _Uses.SAMPLING),
            (params.temperature > 0.0 and params.top_k > 0, _Uses.TOP_K),
            (params.temperature > 0.0 and params.top_p < 1.0, _Uses.TOP_P),
            (params.temperature > 0.0 and params.min_p > 0.0, _Uses.MIN_P),
            ((params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0), _Uses.PENALTIES),
            (bool(params.logit_bias), _Uses.BIAS),
            (bool(stops) and len(output_tokens) < params.min_tokens, _Uses.MIN_TOKENS),
            (params.logprobs is not None, _Uses.LOGPROBS),
        ):
            if used:
                uses |= flag
        self._uses_S[slot] = int(uses)
        self._num_logprobs_S[slot] = params.logprobs or 0
        self._steps_to_min_tokens_S[slot] = params.min_tokens - len(output_tokens)
        if _Uses.BIAS in uses:
            # An id named twice counts twice, as in the sum the client wrote.
            self._bias.set(slot, [token for token, _ in params.logit_bias], [bias for _, bias in params.logit_bias])
        if _Uses.MIN_TOKENS in uses:
            self._stops.set(slot, sorted(set(stops)), [-torch.inf] * len(set(stops)))
        penalty_row = self._new_penalty_row(slot, prompt_tokens, output_tokens) if _Uses.PENALTIES in uses else 0
        self._real_SF[slot] = torch.tensor(
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ]
        )
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        self._int_SF[slot] = torch.tensor([seed, len(output_tokens), top_k, params.min_tokens, penalty_row])

    def release(self, slot: int) -> None:
        """Give back what ``slot`` holds beyond its fixed row; optional, ``start`` does it too."""
        row = self._penalty_row_of_slot.pop(slot, None)
        if row is not None:
            self._free_penalty_rows.append(row)
        self._uses_S[slot] = 0

    def _new_penalty_row(self, slot: int, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> int:
        if not self._free_penalty_rows:
            held = self._prompt_seen_NV.shape[0]
            self._prompt_seen_NV = torch.cat((self._prompt_seen_NV, torch.zeros_like(self._prompt_seen_NV)))
            self._output_counts_NV = torch.cat((self._output_counts_NV, torch.zeros_like(self._output_counts_NV)))
            self._free_penalty_rows.extend(range(held, 2 * held))
        row = self._free_penalty_rows.pop()
        self._penalty_row_of_slot[slot] = row
        self._prompt_seen_NV[row] = torch.bincount(_ids(prompt_tokens), minlength=self.vocab_size).to(self.device) > 0
        self._output_counts_NV[row] = torch.bincount(_ids(output_tokens), minlength=self.vocab_size).to(self.device, torch.int32)
        return row

    # -- a step -----------------------------------------------------------------------------------------------------------

    def sample(self, logits_RV: Tensor, rows: SampleRows, drafts: DraftTokens | None = None) -> SampleOutput:
        """Emit tokens for every item and advance its state. ``logits_RV`` float32 is not modified.

        Raises InvariantError where a row's logits hold NaN or +inf, or nothing but -inf, before any state changes.
        """
        uses_I = self._uses_S[rows.slots]
        uses = _Uses(int(np.bitwise_or.reduce(uses_I)))
        greedy = _Uses.SAMPLING not in uses
        adjusted_RV = logits_RV
        if rows.max_drafts and drafts is None:
            raise InvariantError(f"items verify up to {rows.max_drafts} drafts, but none were given")
        num_rows = logits_RV.shape[0]
        has_drafts = rows.max_drafts > 0 or num_rows != len(rows.slots)
        draft_IK = drafts.tokens_IK[:, : rows.max_drafts] if drafts is not None and rows.max_drafts else None
        item_R: Tensor | None = None
        depth_R: Tensor | None = None
        if has_drafts:
            item_R = torch.repeat_interleave(rows.num_drafts_I + 1, output_size=num_rows)
            depth_R = torch.arange(num_rows, device=self.device) - rows.row_starts_I1[item_R]
        if uses & _ADJUSTS:
            # Before the adjustments, which could turn an infinity into something that looks sound.
            _check_maxima(logits_RV.amax(1), rows)
            adjusted_RV = self._adjusted(logits_RV, rows, uses_I, draft_IK, item_R, depth_R)
        best_R, argmax_R = adjusted_RV.max(1)
        _check_maxima(best_R, rows)
        probs_RV = None if greedy else self._probs(adjusted_RV, rows, uses, uses_I, item_R)
        if draft_IK is None:
            tokens_IK = argmax_R if probs_RV is None else self._draw(probs_RV, rows, argmax_R)
            tokens_IK = tokens_IK.unsqueeze(1)
            counts_I = torch.ones_like(rows.slots_I)
        else:
            assert drafts is not None
            tokens_IK, counts_I = self._verify(draft_IK, drafts.probs_IKV, probs_RV, argmax_R, rows)
        logprobs = self._logprobs(logits_RV, rows, uses_I, tokens_IK, counts_I) if _Uses.LOGPROBS in uses else None
        self._advance(rows, uses_I, tokens_IK, counts_I)
        return SampleOutput(tokens_IK, counts_I, logprobs)

    def draft_controls(self, rows: SampleRows, num_tokens: int) -> DraftControls:
        """Parameters and uniforms [A, num_tokens] with which to draft what follows the tokens just sampled."""
        real_AF, int_AF = self._real_SF[rows.slots_I], self._int_SF[rows.slots_I]
        positions_AK = int_AF[:, _OUTPUT_LEN, None] + torch.arange(num_tokens, device=self.device)
        return DraftControls(
            temperatures_A=real_AF[:, _TEMPERATURE],
            top_k_A=int_AF[:, _TOP_K],
            top_p_A=real_AF[:, _TOP_P],
            min_p_A=real_AF[:, _MIN_P],
            uniforms_AK=kernels.uniforms(int_AF[:, _SEED, None], positions_AK, Draw.DRAFT),
            all_greedy=not bool((self._uses_S[rows.slots] & _Uses.SAMPLING).any()),
        )

    def _adjusted(
        self,
        logits_RV: Tensor,
        rows: SampleRows,
        uses_I: np.ndarray,
        draft_IK: Tensor | None,
        item_R: Tensor | None,
        depth_R: Tensor | None,
    ) -> Tensor:
        """Bias, penalties and the min_tokens mask, on the rows that use them."""
        adjusted_RV = logits_RV.clone()
        slots_R = rows.slots_I if item_R is None else rows.slots_I[item_R]
        for flag in (_Uses.BIAS, _Uses.PENALTIES, _Uses.MIN_TOKENS):
            if not (uses_I & flag).any():
                continue
            row_r = self._rows_using(uses_I, flag, item_R)
            slots_r = slots_R[row_r]
            depth_r = torch.zeros_like(slots_r) if depth_R is None else depth_R[row_r]
            if flag is _Uses.BIAS:
                ids_rE, values_rE = self._bias.get(slots_r)
                adjusted_RV[row_r] = adjusted_RV[row_r].scatter_add_(1, ids_rE, values_rE)
            elif flag is _Uses.MIN_TOKENS:
                ids_rE, values_rE = self._stops.get(slots_r)
                int_rF = self._int_SF[slots_r]
                open_r = int_rF[:, _OUTPUT_LEN] + depth_r >= int_rF[:, _MIN_TOKENS]
                adjusted_RV[row_r] = adjusted_RV[row_r].scatter_add_(1, ids_rE, values_rE.masked_fill(open_r.unsqueeze(1), 0.0))
            else:
                drafts_rK = None if draft_IK is None or item_R is None else draft_IK[item_R[row_r]]
                adjusted_RV[row_r] = self._penalised(adjusted_RV[row_r], slots_r, depth_r, drafts_rK)
        return adjusted_RV

    def _penalised(self, logits_rV: Tensor, slots_r: Tensor, depth_r: Tensor, drafts_rK: Tensor | None) -> Tensor:
        real_rF = self._real_SF[slots_r]
        penalty_row_r = self._int_SF[slots_r, _PENALTY_ROW]
        counts_rV = self._output_counts_NV[penalty_row_r]
        if drafts_rK is not None:  # a row after j drafts sees these drafts as output
            before_rK = torch.arange(drafts_rK.shape[1], device=self.device) < depth_r.unsqueeze(1)
            counts_rV.scatter_add_(1, drafts_rK.masked_fill(~before_rK, 0), before_rK.to(torch.int32))
        prompt_seen_rV = self._prompt_seen_NV[penalty_row_r]
        return kernels.penalised(
            logits_rV, prompt_seen_rV, counts_rV, real_rF[:, _REPETITION], real_rF[:, _PRESENCE], real_rF[:, _FREQUENCY]
        )

    def _rows_using(self, uses_I: np.ndarray, flag: _Uses, item_R: Tensor | None) -> Tensor:
        """Indices of the logit rows whose item uses ``flag``."""
        using_I = (uses_I & flag) != 0
        if item_R is None:
            return torch.from_numpy(np.flatnonzero(using_I)).to(self.device)
        return torch.from_numpy(using_I).to(self.device)[item_R].nonzero().squeeze(1)

    def _probs(self, adjusted_RV: Tensor, rows: SampleRows, uses: _Uses, uses_I: np.ndarray, item_R: Tensor | None) -> Tensor:
        """The filtered distribution of every row; rows of greedy items hold something nobody reads."""
        slots_R = rows.slots_I if item_R is None else rows.slots_I[item_R]
        real_RF = self._real_SF[slots_R]
        filters = _Uses.TOP_K | _Uses.TOP_P
        top = bool(uses & filters)
        everywhere = top and bool(((uses_I & filters) != 0).all())
        return kernels.filtered_probs(
            adjusted_RV,
            real_RF[:, _TEMPERATURE],
            self._int_SF[slots_R, _TOP_K] if top else None,
            real_RF[:, _TOP_P] if top else None,
            real_RF[:, _MIN_P] if _Uses.MIN_P in uses else None,
            self._rows_using(uses_I, filters, item_R) if top and not everywhere else None,
        )

    def _draw(self, weights_IV: Tensor, rows: SampleRows, argmax_I: Tensor, depth_I: Tensor | None = None) -> Tensor:
        """One token per item: inverse CDF for sampled requests, the arg-max for greedy ones."""
        int_IF = self._int_SF[rows.slots_I]
        positions_I = int_IF[:, _OUTPUT_LEN] if depth_I is None else int_IF[:, _OUTPUT_LEN] + depth_I
        sampled_I = kernels.inverse_cdf(weights_IV, kernels.uniforms(int_IF[:, _SEED], positions_I, Draw.SAMPLE))
        return torch.where(self._real_SF[rows.slots_I, _TEMPERATURE] > 0.0, sampled_I, argmax_I)

    def _verify(
        self, draft_IK: Tensor, q_IKV: Tensor | None, probs_RV: Tensor | None, argmax_R: Tensor, rows: SampleRows
    ) -> tuple[Tensor, Tensor]:
        """Keep the longest prefix of accepted drafts and add one token: from the residual after a rejection, else the bonus."""
        depth_K = torch.arange(rows.max_drafts, device=self.device)
        drafted_IK = depth_K < rows.num_drafts_I.unsqueeze(1)
        row_IK = (rows.row_starts_I1[:-1].unsqueeze(1) + depth_K).clamp_max_(argmax_R.shape[0] - 1)
        draft_IK = draft_IK.masked_fill(~drafted_IK, 0)
        accept_IK = argmax_R[row_IK] == draft_IK
        if probs_RV is not None:
            int_IF = self._int_SF[rows.slots_I]
            uniforms_IK = kernels.uniforms(int_IF[:, _SEED, None], int_IF[:, _OUTPUT_LEN, None] + depth_K, Draw.ACCEPT)
            q_draft_IK = None if q_IKV is None else q_IKV[:, : rows.max_drafts].gather(2, draft_IK.unsqueeze(2)).squeeze(2)
            sampled_IK = kernels.accept_sampled(probs_RV[row_IK, draft_IK], q_draft_IK, uniforms_IK)
            accept_IK = torch.where(self._real_SF[rows.slots_I, _TEMPERATURE, None] > 0.0, sampled_IK, accept_IK)
        accepted_I = (accept_IK & drafted_IK).to(torch.int64).cumprod(1).sum(1)
        last_row_I = rows.row_starts_I1[:-1] + accepted_I
        last_I = argmax_R[last_row_I]
        if probs_RV is not None:
            weights_IV = probs_RV[last_row_I]
            rejected_I = accepted_I < rows.num_drafts_I
            at_I = accepted_I.clamp_max(rows.max_drafts - 1)  # the rejected draft
            if q_IKV is None:
                q_IV = torch.zeros_like(weights_IV).scatter_(1, draft_IK.gather(1, at_I.unsqueeze(1)), 1.0)
            else:
                q_IV = q_IKV[torch.arange(len(at_I), device=self.device), at_I].to(weights_IV.dtype)
            weights_IV = kernels.residual(weights_IV, q_IV * rejected_I.unsqueeze(1))
            last_I = self._draw(weights_IV, rows, last_I, accepted_I)
        depth_K1 = torch.arange(rows.max_drafts + 1, device=self.device)
        padded_IK = torch.nn.functional.pad(draft_IK, (0, 1))
        tokens_IK = torch.where(depth_K1 < accepted_I.unsqueeze(1), padded_IK, 0)
        return tokens_IK.scatter_(1, accepted_I.unsqueeze(1), last_I.unsqueeze(1)), accepted_I + 1

    def _advance(self, rows: SampleRows, uses_I: np.ndarray, tokens_IK: Tensor, counts_I: Tensor) -> None:
        self._int_SF[rows.slots_I, _OUTPUT_LEN] += counts_I
        if (uses_I & _Uses.PENALTIES).any():
            row_I = self._int_SF[rows.slots_I, _PENALTY_ROW]
            emitted_IK = torch.arange(tokens_IK.shape[1], device=self.device) < counts_I.unsqueeze(1)
            emitted_IK &= row_I.unsqueeze(1) > 0  # row 0 is everybody without penalties
            cells = (row_I.unsqueeze(1) * self.vocab_size + tokens_IK).flatten()
            self._output_counts_NV.view(-1).index_add_(0, cells, emitted_IK.flatten().to(torch.int32))
        if (uses_I & _Uses.MIN_TOKENS).any():
            # At least one token came; when min_tokens steps are over the mask cannot apply any more.
            slots = np.asarray(rows.slots)[(uses_I & _Uses.MIN_TOKENS) != 0]
            self._steps_to_min_tokens_S[slots] -= 1
            self._uses_S[slots[self._steps_to_min_tokens_S[slots] <= 0]] &= 0xFF ^ int(_Uses.MIN_TOKENS)

    def _logprobs(
        self, logits_RV: Tensor, rows: SampleRows, uses_I: np.ndarray, tokens_IK: Tensor, counts_I: Tensor
    ) -> list[list[TokenLogprobs] | None]:
        """Log-probabilities of the emitted tokens of the items that asked, from the model's own distribution."""
        asking = np.flatnonzero((uses_I & _Uses.LOGPROBS) != 0)
        item_i = torch.from_numpy(asking).to(self.device)
        num_top = int(self._num_logprobs_S[rows.slots].max())
        width = tokens_IK.shape[1]
        depth_K = torch.arange(width, device=self.device)
        row_iK = torch.minimum(rows.row_starts_I1[item_i].unsqueeze(1) + depth_K, rows.row_starts_I1[item_i + 1].unsqueeze(1) - 1)
        logprobs_iKV = logits_RV[row_iK].to(torch.float32).log_softmax(2)
        chosen = logprobs_iKV.gather(2, tokens_IK[item_i].unsqueeze(2)).squeeze(2).tolist()
        top = logprobs_iKV.topk(min(num_top, self.vocab_size), dim=2)
        top_values, top_ids = top.values.tolist(), top.indices.tolist()
        counts = counts_I[item_i].tolist()
        result: list[list[TokenLogprobs] | None] = [None] * len(rows.slots)
        for index, item in enumerate(asking.tolist()):
            wanted = int(self._num_logprobs_S[rows.slots[item]])
            result[item] = [
                TokenLogprobs(chosen[index][j], tuple(top_ids[index][j][:wanted]), tuple(top_values[index][j][:wanted]))
                for j in range(counts[index])
            ]
        return result


class _SparseRows:
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


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64).reshape(-1))


def _check_maxima(best_R: Tensor, rows: SampleRows) -> None:
    """A maximum is finite exactly where the row has no NaN (which max propagates), no +inf and something above -inf."""
    if bool(best_R.isfinite().all()):
        return
    row = int((~best_R.isfinite()).nonzero()[0, 0])
    item = int((rows.row_starts_I1[1:] <= row).sum())
    value = float(best_R[row])
    what = "every token is masked (-inf)" if value == -torch.inf else f"the largest logit is {value}"
    raise InvariantError(f"cannot sample slot {rows.slots[item]}: {what}; the model's output or its logit bias is unusable")
