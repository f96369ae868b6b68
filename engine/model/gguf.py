"""GGUF files of the dense family: metadata to a Hugging Face config, dequantised tensors under official names, the BPE tokenizer."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.model_config import model_spec
from engine.core.specs import DenseSpec
from engine.core.tensors import expected_tensors
from engine.model.gguf_header import check_header

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOKEN_CONTROL, _TOKEN_USER_DEFINED = 3, 4


class GgufFile:
    """A memory-mapped GGUF file. Raises ConfigError for what is damaged, of another architecture, or stored in an unknown way."""

    def __init__(self, path: Path) -> None:
        import gguf  # an optional package, needed for this format only

        self.path = path
        check_header(path)
        try:
            self._reader = gguf.GGUFReader(path)
            self._fields = {name: field for name, field in self._reader.fields.items() if not name.startswith("GGUF.")}
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except (ValueError, IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a readable GGUF file ({error})") from None
        self._kind = self._text("general.architecture")
        if self._kind not in _ARCHITECTURES:
            raise ConfigError(f"{path}: general.architecture is {self._kind!r}; known: {', '.join(_ARCHITECTURES)}")
        if "rope_freqs.weight" in self._tensors:
            raise ConfigError(f"{path}: rope_freqs.weight (Llama 3.1 frequency factors) is not supported; use the safetensors model")

    # -- metadata ---------------------------------------------------------------------------------------------------------

    def _value(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def _text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: {key} is {value!r}; needed: a string")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self.path}: {key} is missing or not a list")
        return value

    def config(self) -> dict[str, Any]:
        """The metadata as a config.json of Hugging Face's layout; ``model_spec`` checks the values."""
        hidden = self._value(f"{self._kind}.embedding_length")
        heads = self._value(f"{self._kind}.attention.head_count")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise ConfigError(
                f"{self.path}: embedding_length {hidden!r} or attention.head_count {heads!r} is missing or not a positive integer"
            )
        eos = self._value("tokenizer.ggml.eos_token_id")
        turn_end = self._value("tokenizer.ggml.eot_token_id")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self._kind]],
            "model_type": self._kind,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "num_hidden_layers": self._value(f"{self._kind}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value(f"{self._kind}.attention.head_count_kv", heads),
            "head_dim": self._value(f"{self._kind}.attention.key_length", hidden // heads),
            "intermediate_size": self._value(f"{self._kind}.feed_forward_length"),
            "max_position_embeddings": self._value(f"{self._kind}.context_length"),
            # Metadata are float32; seven digits are what was written.
            "rms_norm_eps": _seven_digits(self._value(f"{self._kind}.attention.layer_norm_rms_epsilon")),
            "rope_theta": _seven_digits(self._value(f"{self._kind}.rope.freq_base", 10_000.0)),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos if turn_end in (None, eos) else [token for token in (eos, turn_end) if token is not None],
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
        }
        scaling = self._rope_scaling()
        return config | ({"rope_scaling": scaling} if scaling else {})

    def _rope_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self._kind}.rope.scaling"
        kind = self._value(f"{prefix}.type", "none")
        if kind == "none":
            return None
        scaling = {
            "rope_type": kind,
            "factor": self._value(f"{prefix}.factor"),
            "original_max_position_embeddings": self._value(f"{prefix}.original_context_length"),
            "attention_factor": self._value(f"{prefix}.attn_factor"),
            "beta_fast": self._value(f"{prefix}.yarn_beta_fast"),
            "beta_slow": self._value(f"{prefix}.yarn_beta_slow"),
        }
        return {key: value for key, value in scaling.items() if value is not None}

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ConfigError(f"{self.path}: tensor token_embd.weight is missing")
        return int(embedding.shape[1])  # GGUF names the fastest dimension first

    @cached_property
    def spec(self) -> DenseSpec:
        spec = model_spec(self.config(), self.path.stem)
        assert isinstance(spec, DenseSpec)
        return spec

    # -- tensors ----------------------------------------------------------------------------------------------------------

    def names(self) -> dict[str, str]:
        """Official name -> name in this file. Raises ConfigError for a tensor nobody knows."""
        return {self._official(name): name for name in self._tensors}

    def _official(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP_NAMES and suffix == "weight":
            return f"{_TOP_NAMES[stem]}.weight"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES and suffix in ("weight", "bias"):
            return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{suffix}"
        raise ConfigError(f"{self.path}: tensor {name} is unknown")

    def verify(self) -> None:
        """Raise ConfigError naming the first tensor that is missing, foreign, of another shape or of an unknown storage type."""
        import gguf

        expected, found = expected_tensors(self.spec), self.names()
        for name in expected:
            if name not in found:
                raise ConfigError(f"{self.path}: tensor {name} is missing; expected shape {list(expected[name].shape)}")
        for name, own in found.items():
            tensor = self._tensors[own]
            shape = tuple(int(side) for side in reversed(tensor.shape))
            if name not in expected:
                raise ConfigError(f"{self.path}: tensor {own} ({name}) is not part of a {self.spec.architecture} with these settings")
            if shape != expected[name].shape:
                raise ConfigError(f"{self.path}: tensor {own} has shape {list(shape)}; expected {list(expected[name].shape)}")
            try:
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(
                    f"{self.path}: tensor {own} is stored as {tensor.tensor_type.name}, which cannot be read ({error})"
                ) from None

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.get(name).narrow(dim, start, stop - start)

    def get(self, name: str) -> Tensor:
        """The tensor under its official name in float32, q and k rows in Hugging Face's order."""
        import gguf

        tensor = self._tensors[self.names_cached[name]]
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if self._kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = self.spec.num_heads if ".q_proj." in name else self.spec.num_kv_heads
            # llama.cpp rotates adjacent rows, Hugging Face rows half a head apart.
            values = values.view(heads, self.spec.head_dim // 2, 2, -1).transpose(1, 2).reshape(values.shape)
        return values

    @cached_property
    def names_cached(self) -> dict[str, str]:
        return self.names()

    # -- text -------------------------------------------------------------------------------------------------------------

    def chat_template(self) -> str | None:
        value = self._value("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def tokenizer_json(self) -> bytes | None:
        """The embedded byte-level BPE as a tokenizer.json; None where the file has no tokenizer."""
        if "tokenizer.ggml.model" not in self._fields:
            return None
        model, pre = self._text("tokenizer.ggml.model"), self._value("tokenizer.ggml.pre", "gpt-2")
        if model != "gpt2" or pre not in ("smollm", "gpt-2", "default"):
            raise ConfigError(
                f"{self.path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; known: gpt2 with smollm or gpt-2"
            )
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        tokens, kinds = self._list("tokenizer.ggml.tokens"), self._list("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self._list("tokenizer.ggml.merges")]
        if len(tokens) != len(kinds) or len(set(tokens)) != len(tokens):
            raise ConfigError(f"{self.path}: {len(tokens)} tokens ({len(set(tokens))} distinct) and {len(kinds)} token types do not match")
        try:
            tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
        except Exception as error:  # the library raises a bare Exception for a merge it cannot apply
            raise ConfigError(f"{self.path}: the tokenizer's merges do not fit its tokens ({error})") from None
        bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_level]) if pre == "smollm" else bytes_level
        )
        tokenizer.decoder = decoders.ByteLevel()
        added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_TOKEN_CONTROL, _TOKEN_USER_DEFINED)]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in added if kind == _TOKEN_CONTROL])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == _TOKEN_USER_DEFINED])
        bos = self._value("tokenizer.ggml.bos_token_id")
        if self._value("tokenizer.ggml.add_bos_token", False) and isinstance(bos, int) and bos < len(tokens):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
            )
        return str(tokenizer.to_str()).encode()


def convert(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a GGUF file as a model folder: config.json, model.safetensors in ``dtype``, tokenizer.json, chat_template.jinja.

    Raises ConfigError for a file that cannot be read, OSError for a folder that takes no more.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = GgufFile(path)
    file.verify()
    folder.mkdir(parents=True)
    tensors = {name: file.get(name).to(dtype).contiguous() for name in expected_tensors(file.spec)}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    (folder / "config.json").write_text(json.dumps(file.config(), indent=2) + "\n", encoding="utf-8")
    tokenizer, template = file.tokenizer_json(), file.chat_template()
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _seven_digits(value: object) -> object:
    return float(f"{value:.7g}") if isinstance(value, float) else value
