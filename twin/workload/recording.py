"""Recorded requests in columns: 44 bytes each, and 8 a block of a shared prefix; prompts are made from them one by one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable


class Recording:
    """Recorded requests by column, in order of arrival. ``arrival_s`` counts from the first; ``shared_tokens`` of the prompt are a
    beginning that all have; ``texts`` numbers the prompts: equal numbers are equal prompts; block ids are those of hash_ids."""

    def __init__(self) -> None:
        self.arrival_s = array("d")
        self.input_tokens = array("i")
        self.output_tokens = array("i")
        self.cancel_after_s = array("d")  # infinite: never
        self.shared_tokens = array("i")
        self.texts = array("q")
        self.block_ids = array("q")
        self.block_ends = array("q")  # of a request's ids in block_ids; they begin where its predecessor's end

    def __len__(self) -> int:
        return len(self.arrival_s)

    def add(
        self,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        *,
        block_ids: Iterable[int] = (),
        shared_tokens: int = 0,
        text: int | None = None,
        cancel_after_s: float = math.inf,
    ) -> None:
        self.texts.append(len(self) if text is None else text)
        self.arrival_s.append(arrival_s)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.cancel_after_s.append(cancel_after_s)
        self.shared_tokens.append(shared_tokens)
        self.block_ids.extend(block_ids)
        self.block_ends.append(len(self.block_ids))

    def blocks(self, index: int) -> array[int]:
        return self.block_ids[self.block_ends[index - 1] if index else 0 : self.block_ends[index]]
