"""The sampler: from the logits of a step to the tokens each request emits, speculative drafts verified on the way.

Parameters live in per-slot tensors (``slot_parameters``); what a step does is decided by the union of its requests' features, known on
the host. All-greedy steps are one arg-max.

Order of the transformations: logit bias, repetition / presence / frequency penalties, min_tokens mask, grammar mask, temperature, top-k,
top-p, min-p. Logprobs are of the model's own distribution, before all of them.

Randomness is a hash of (seed, output position, kind of draw), see ``kernels.sampling.uniforms``: what a request draws depends
neither on the batch it shares nor on preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import InvariantError
from engine.core.plan import TokenLogprobs
from engine.core.sampling import SamplingParams
from engine.kernels import sampling as kernels
from engine.kernels.sampling import Draw
from engine.kernels.timing import component
from engine.model.grammar_state import GrammarMasks, GrammarState
from engine.model.sample import DraftControls, DraftTokens, SampleOutput, SampleRows, blanked, unusable
from engine.model.slot_parameters import (
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    OUTPUT_LEN,
    PENALTY_ROW,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SlotParameters,
    Uses,
)

_SHIFTS = Uses.PENALTIES | Uses.BIAS | Uses.MIN_TOKENS


class Sampler:
    """Sampling state of one rank's slots. ``start`` before a slot's first ``sample``; a later ``start`` replaces the request.

    ``forced_acceptance`` is for measurements: a verification then accepts so many drafts on average (the token of the model itself not
    counted), drawn from seed and position as everything is, whatever the model says of them. Texts lose their meaning.
    """

    def __init__(
        self,
        vocab_size: int,
        max_running: int,
        device: torch.device,
        eos_token_ids: Sequence[int],
        forced_acceptance: float | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._forced_acceptance = forced_acceptance
        self._slots = SlotParameters(vocab_size, max_running, device, eos_token_ids)
        self._masks = GrammarMasks(vocab_size, device, eos_token_ids)
        self._grammars: dict[int, GrammarState] = {}

    # -- requests ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """Put a request into ``slot``: new, resumed after a preemption, or forked (then with a seed and a ``grammar`` of its own).

        Its next draw is that of output position ``len(output_tokens)``; ``grammar`` has taken those tokens in.
        """
        if (grammar is None) != (params.grammar is None):
            raise InvariantError(f"slot {slot}: a request with a grammar starts with its state, and none without")
        self._slots.start(slot, params, seed, prompt_tokens, output_tokens)
        self._grammars.pop(slot, None)
        if grammar is not None:
            self._grammars[slot] = grammar

    def release(self, slot: int) -> None:
        """Give back what ``slot`` holds beyond its fixed row; optional, ``start`` does it too."""
        self._slots.release(slot)
        self._grammars.pop(slot, None)

    # -- a step -----------------------------------------------------------------------------------------------------------

    @component("sampler")
    def sample(self, logits_RV: Tensor, rows: SampleRows, drafts: DraftTokens | None = None) -> SampleOutput:
        """Emit tokens for every item and advance its state. ``logits_RV`` float32 is not modified.

        An item fails alone (see ``SampleOutput.errors``) where the logits of one of its rows hold NaN or +inf, where nothing is left to
        choose from, and where its grammar comes to a dead end.
        """
        uses_I = self._slots.uses_S[rows.slots]
        uses = Uses(int(np.bitwise_or.reduce(uses_I)))
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
        errors: dict[int, str] = {}
        unusable_logits = False
        if uses & _SHIFTS:
            # Before the adjustments, which could turn an infinity into something that looks sound. (A mask cannot.)
            errors, unusable_logits = unusable(logits_RV.amax(1), rows)
        if uses & (_SHIFTS | Uses.GRAMMAR):
            adjusted_RV = self._adjusted(logits_RV, rows, uses_I, draft_IK, item_R, depth_R)
        best_R, argmax_R = adjusted_RV.max(1)
        found, found_unusable = unusable(best_R, rows)
        errors, unusable_logits = found | errors, unusable_logits or found_unusable
        if Uses.GRAMMAR in uses:
            errors |= self._grammar_errors(rows, uses_I)
        if errors:
            adjusted_RV = blanked(adjusted_RV, rows, errors)
            argmax_R = adjusted_RV.argmax(1)
        probs_RV = self._probs(adjusted_RV, rows, uses, uses_I, item_R) if Uses.SAMPLING in uses else None
        if draft_IK is None:
            tokens_IK = argmax_R if probs_RV is None else self._draw(probs_RV, rows, argmax_R)
            tokens_IK = tokens_IK.unsqueeze(1)
            counts_I = torch.ones_like(rows.slots_I)
        else:
            assert drafts is not None
            tokens_IK, counts_I = self._verify(draft_IK, drafts.probs_IKV, probs_RV, argmax_R, rows)
        if errors:
            failed = torch.tensor(sorted(errors), device=self.device)
            tokens_IK, counts_I = tokens_IK.index_fill(0, failed, 0), counts_I.index_fill(0, failed, 0)
        logprobs = self._logprobs(logits_RV, rows, uses_I, tokens_IK, counts_I) if Uses.LOGPROBS in uses else None
        self._slots.advance(rows.slots, rows.slots_I, tokens_IK, counts_I)
        if Uses.GRAMMAR in uses:
            self._advance_grammars(rows, uses_I, tokens_IK, counts_I)
        return SampleOutput(tokens_IK, counts_I, logprobs, errors, unusable_logits)

    def draft_controls(self, rows: SampleRows, num_tokens: int) -> DraftControls:
        """Parameters and uniforms [A, num_tokens] with which to draft what follows the tokens just sampled."""
        real_AF, int_AF = self._slots.real_SF[rows.slots_I], self._slots.int_SF[rows.slots_I]
        positions_AK = int_AF[:, OUTPUT_LEN, None] + torch.arange(num_tokens, device=self.device)
        return DraftControls(
            temperatures_A=real_AF[:, TEMPERATURE],
            top_k_A=int_AF[:, TOP_K],
            top_p_A=real_AF[:, TOP_P],
            min_p_A=real_AF[:, MIN_P],
            uniforms_AK=kernels.uniforms(int_AF[:, SEED, None], positions_AK, Draw.DRAFT),
            all_greedy=not bool((self._slots.uses_S[rows.slots] & Uses.SAMPLING).any()),
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
        """Bias, penalties, the min_tokens mask and last the grammars' masks, on the rows that use them."""
        masks_all = bool(((uses_I & Uses.GRAMMAR) != 0).all())
        in_place = not masks_all or bool((uses_I & _SHIFTS).any())
        adjusted_RV = logits_RV.clone() if in_place else logits_RV
        slots_R = rows.slots_I if item_R is None else rows.slots_I[item_R]
        for flag in (Uses.BIAS, Uses.PENALTIES, Uses.MIN_TOKENS, Uses.GRAMMAR):
            if not (uses_I & flag).any():
                continue
            if flag is Uses.GRAMMAR and masks_all:
                adjusted_RV = kernels.masked(adjusted_RV, self._grammar_masks(rows, uses_I, draft_IK))
                continue
            row_r = self._rows_using(uses_I, flag, item_R)
            slots_r = slots_R[row_r]
            depth_r = torch.zeros_like(slots_r) if depth_R is None else depth_R[row_r]
            if flag is Uses.BIAS:
                ids_rE, values_rE = self._slots.bias.get(slots_r)
                adjusted_RV[row_r] = adjusted_RV[row_r].scatter_add_(1, ids_rE, values_rE)
            elif flag is Uses.MIN_TOKENS:
                ids_rE, values_rE = self._slots.stops.get(slots_r)
                int_rF = self._slots.int_SF[slots_r]
                open_r = int_rF[:, OUTPUT_LEN] + depth_r >= int_rF[:, MIN_TOKENS]
                adjusted_RV[row_r] = adjusted_RV[row_r].scatter_add_(1, ids_rE, values_rE.masked_fill(open_r.unsqueeze(1), 0.0))
            elif flag is Uses.GRAMMAR:
                adjusted_RV[row_r] = kernels.masked(adjusted_RV[row_r], self._grammar_masks(rows, uses_I, draft_IK))
            else:
                drafts_rK = None if draft_IK is None or item_R is None else draft_IK[item_R[row_r]]
                adjusted_RV[row_r] = self._penalised(adjusted_RV[row_r], slots_r, depth_r, drafts_rK)
        return adjusted_RV

    def _penalised(self, logits_rV: Tensor, slots_r: Tensor, depth_r: Tensor, drafts_rK: Tensor | None) -> Tensor:
        real_rF = self._slots.real_SF[slots_r]
        penalty_row_r = self._slots.int_SF[slots_r, PENALTY_ROW]
        counts_rV = self._slots.output_counts_NV[penalty_row_r]
        if drafts_rK is not None:  # a row after j drafts sees these drafts as output
            before_rK = torch.arange(drafts_rK.shape[1], device=self.device) < depth_r.unsqueeze(1)
            counts_rV.scatter_add_(1, drafts_rK.masked_fill(~before_rK, 0), before_rK.to(torch.int32))
        prompt_seen_rV = self._slots.prompt_seen_NV[penalty_row_r]
        return kernels.penalised(logits_rV, prompt_seen_rV, counts_rV, real_rF[:, REPETITION], real_rF[:, PRESENCE], real_rF[:, FREQUENCY])

    def _rows_using(self, uses_I: np.ndarray, flag: Uses, item_R: Tensor | None) -> Tensor:
        """Indices of the logit rows whose item uses ``flag``."""
        using_I = (uses_I & flag) != 0
        if item_R is None:
            return torch.from_numpy(np.flatnonzero(using_I)).to(self.device)
        return torch.from_numpy(using_I).to(self.device)[item_R].nonzero().squeeze(1)

    def _probs(self, adjusted_RV: Tensor, rows: SampleRows, uses: Uses, uses_I: np.ndarray, item_R: Tensor | None) -> Tensor:
        """The filtered distribution of every row; rows of greedy items hold something nobody reads."""
        slots_R = rows.slots_I if item_R is None else rows.slots_I[item_R]
        real_RF = self._slots.real_SF[slots_R]
        filters = Uses.TOP_K | Uses.TOP_P
        top = bool(uses & filters)
        everywhere = top and bool(((uses_I & filters) != 0).all())
        return kernels.filtered_probs(
            adjusted_RV,
            real_RF[:, TEMPERATURE],
            self._slots.int_SF[slots_R, TOP_K] if top else None,
            real_RF[:, TOP_P] if top else None,
            real_RF[:, MIN_P] if Uses.MIN_P in uses else None,
            self._rows_using(uses_I, filters, item_R) if top and not everywhere else None,
        )

    def _draw(self, weights_IV: Tensor, rows: SampleRows, argmax_I: Tensor, depth_I: Tensor | None = None) -> Tensor:
        """One token per item: inverse CDF for sampled requests, the arg-max for greedy ones."""
        int_IF = self._slots.int_SF[rows.slots_I]
        positions_I = int_IF[:, OUTPUT_LEN] if depth_I is None else int_IF[:, OUTPUT_LEN] + depth_I
        sampled_I = kernels.inverse_cdf(weights_IV, kernels.uniforms(int_IF[:, SEED], positions_I, Draw.SAMPLE))
        return torch.where(self._slots.real_SF[rows.slots_I, TEMPERATURE] > 0.0, sampled_I, argmax_I)

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
            int_IF = self._slots.int_SF[rows.slots_I]
            uniforms_IK = kernels.uniforms(int_IF[:, SEED, None], int_IF[:, OUTPUT_LEN, None] + depth_K, Draw.ACCEPT)
            q_draft_IK = None if q_IKV is None else q_IKV[:, : rows.max_drafts].gather(2, draft_IK.unsqueeze(2)).squeeze(2)
            sampled_IK = kernels.accept_sampled(probs_RV[row_IK, draft_IK], q_draft_IK, uniforms_IK)
            accept_IK = torch.where(self._slots.real_SF[rows.slots_I, TEMPERATURE, None] > 0.0, sampled_IK, accept_IK)
        accepted_I = (accept_IK & drafted_IK).to(torch.int64).cumprod(1).sum(1)
        if self._forced_acceptance is not None:
            accepted_I = self._forced(self._forced_acceptance, rows)
        last_row_I = rows.row_starts_I1[:-1] + accepted_I
        last_I = argmax_R[last_row_I]
        if probs_RV is not None:
            weights_IV = probs_RV[last_row_I]
            # A forced rejection leaves no residual to draw from: the model may be sure of the draft.
            rejected_I = (accepted_I < rows.num_drafts_I) & (self._forced_acceptance is None)
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

    def _forced(self, mean: float, rows: SampleRows) -> Tensor:
        """Accepted drafts [I]: the whole part of ``mean``, and one more in a share of the positions that is the rest of it."""
        int_IF = self._slots.int_SF[rows.slots_I]
        one_more_I = kernels.uniforms(int_IF[:, SEED], int_IF[:, OUTPUT_LEN], Draw.ACCEPT) < mean % 1.0
        return (int(mean) + one_more_I.to(torch.int64)).minimum(rows.num_drafts_I)

    def _grammar_masks(self, rows: SampleRows, uses_I: np.ndarray, draft_IK: Tensor | None) -> Tensor:
        """Masks [r, W] of all rows of the items with a grammar, in the order of the rows."""
        items = np.flatnonzero((uses_I & Uses.GRAMMAR) != 0).tolist()
        states = [self._grammars[rows.slots[item]] for item in items]
        if draft_IK is None:
            return self._masks.fill(states, [()] * len(states))
        tokens, counts = draft_IK[items].tolist(), rows.num_drafts_I[items].tolist()
        return self._masks.fill(states, [row[:count] for row, count in zip(tokens, counts, strict=True)])

    def _grammar_errors(self, rows: SampleRows, uses_I: np.ndarray) -> dict[int, str]:
        errors = {item: self._grammars[rows.slots[item]].error for item in np.flatnonzero((uses_I & Uses.GRAMMAR) != 0).tolist()}
        return {item: error for item, error in errors.items() if error is not None}

    def _advance_grammars(self, rows: SampleRows, uses_I: np.ndarray, tokens_IK: Tensor, counts_I: Tensor) -> None:
        items = np.flatnonzero((uses_I & Uses.GRAMMAR) != 0).tolist()
        for item, tokens, count in zip(items, tokens_IK[items].tolist(), counts_I[items].tolist(), strict=True):
            self._grammars[rows.slots[item]].advance(tokens[:count])

    def _logprobs(
        self, logits_RV: Tensor, rows: SampleRows, uses_I: np.ndarray, tokens_IK: Tensor, counts_I: Tensor
    ) -> list[list[TokenLogprobs] | None]:
        """Log-probabilities of the emitted tokens of the items that asked, from the model's own distribution."""
        asking = np.flatnonzero((uses_I & Uses.LOGPROBS) != 0)
        item_i = torch.from_numpy(asking).to(self.device)
        num_top = int(self._slots.num_logprobs_S[rows.slots].max())
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
            wanted = int(self._slots.num_logprobs_S[rows.slots[item]])
            result[item] = [
                TokenLogprobs(chosen[index][j], tuple(top_ids[index][j][:wanted]), tuple(top_values[index][j][:wanted]))
                for j in range(counts[index])
            ]
        return result
