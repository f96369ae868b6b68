"""The engine's options and what they mean together. Imports no torch: `check`, the twin and the actors read it too."""

from __future__ import annotations

from engine.options import Option

ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("layout", str, "tp1dp1ep1", "parallel layout, e.g. tp1dp2ep2", ("--parallel-layout",)),
    Option("dtype", str, "auto", "compute dtype; auto is bfloat16, for V4.1 on a CPU float32", choices=("auto", "bfloat16", "float32")),
    Option("device", str, "auto", "cpu, cuda or cuda:N; auto takes a GPU where there is one"),
    Option("num-threads", int, None, "CPU threads of a worker; auto is every core", low=1, high=1024),
    Option("block-size", int, 128, "tokens per KV block", ("--page-size",), low=1, high=65536),
    Option("max-total-tokens", int, None, "KV capacity in tokens; auto fits the memory budget", low=1, high=1 << 34),
    Option("mem-fraction-static", float, 0.85, "share of the device's memory for weights and KV (on a CPU: a quarter of it)",
           ("--gpu-memory-utilization", "--memory-ratio"), low=0.01, high=1.0),
    Option("context-length", int, None, "longest sequence in tokens; auto is the model's limit or the KV capacity",
           ("--max-model-len", "--max-seq-len", "-c"), low=2, high=1 << 30),
    Option("max-running-requests", int, 64, "sequences in a step, per DP rank", ("--max-num-seqs", "--max_batch_size"), low=1, high=65536),
    Option("max-waiting-requests", int, 4096, "queue bound; one more is refused", ("--max-queued-requests",), low=1, high=1 << 20),
    Option("max-num-batched-tokens", int, 2048, "token budget of a step, per DP rank", ("--max-prefill-tokens",), low=1, high=1 << 20),
    Option("chunked-prefill-size", int, None, "longest prompt chunk in tokens; auto is the token budget",
           ("--max-prefill-length", "--max-extend-length"), low=1, high=1 << 20),
    Option("draft-tokens", int, 0, "tokens drafted and verified per step; 0 switches speculation off",
           ("--speculative-num-draft-tokens", "--nextn"), low=0, high=64),
    Option("disable-radix-cache", bool, False, "do not reuse the KV of shared prefixes", ("--no-enable-prefix-caching",)),
    Option("order-policy", str, "fcfs", "order of admission", ("--schedule-policy",), choices=("fcfs", "longest-prefix", "priority")),
    Option("eviction-policy", str, "lru", "order of eviction from the prefix cache", choices=("lru", "lfu", "slru", "priority")),
    Option("num-window-tails", int, None, "stored window states a prefix hit can resume from (V4.1); auto is 4 per running request",
           low=0, high=1 << 20),
    Option("swap-space-tokens", int, 0, "host KV for preempted requests, in tokens; 0 recomputes instead", low=0, high=1 << 34),
    Option("swap-threshold-tokens", int, 1024, "tokens from which a preempted request is swapped", low=0, high=1 << 30),
    Option("cache-rounding", str, "on", "round cached rows to FP8/FP4 as V4.1 does (no effect on the dense family)", choices=("on", "off")),
    Option("engram", str, "gpu", "where the Engram tables live", choices=("gpu", "replicated", "host")),
    Option("redundant-experts", int, 0, "extra copies of busy experts in the backbone", low=0, high=65536),
    Option("draft-redundant-experts", int, 0, "extra copies of busy experts in the draft", low=0, high=65536),
    Option("load-format", str, "auto", "auto reads the checkpoint; random makes seeded weights of its shapes", choices=("auto", "random")),
    Option("random-seed", int, 0, "seed of the engine: random weights and seeds of requests that bring none", low=0, high=2**63 - 1),
    Option("on-worker-death", str, "exit", "what follows a worker's death", choices=("exit", "restart")),
    Option("heartbeat-timeout", float, 10.0, "seconds without a sign of life before a worker counts as dead", low=0.1, high=3600),
    Option("step-timeout", float, 600.0, "seconds a step may take before its worker counts as hung", low=0.1, high=86400),
    Option("start-timeout", float, 900.0, "seconds a worker may take to load", low=0.1, high=86400),
    Option("shutdown-timeout", float, 30.0, "seconds running requests get to finish after the first stop signal",
           ("--graceful-timeout",), low=0.0, high=86400),
)  # fmt: skip

SAMPLING_OPTIONS: tuple[Option, ...] = (
    Option("max-tokens", int, 128, "tokens to generate at most", ("--max-new-tokens", "--max-completion-tokens"), low=1, high=1 << 24),
    Option("min-tokens", int, 0, "no end of text before this many tokens", low=0, high=1 << 24),
    Option("temperature", float, 0.0, "0 is greedy", ("--temp",), low=0.0, high=100.0),
    Option("top-p", float, 1.0, "nucleus: smallest set of tokens with this probability", low=0.0, high=1.0),
    Option("top-k", int, 0, "keep the k likeliest tokens; 0 keeps all", low=0, high=1 << 31),
    Option("min-p", float, 0.0, "drop tokens below this share of the likeliest one", low=0.0, high=1.0),
    Option("repetition-penalty", float, 1.0, "divides the logits of seen tokens", low=1e-6, high=100.0),
    Option("presence-penalty", float, 0.0, "subtracted once from generated tokens' logits", low=-2.0, high=2.0),
    Option("frequency-penalty", float, 0.0, "subtracted per occurrence from generated tokens' logits", low=-2.0, high=2.0),
    Option("seed", int, None, "seed of the sampler; auto draws one", low=0, high=2**63 - 1),
    Option("logprobs", int, None, "log-probabilities of the chosen and the N likeliest tokens (with --json)", low=0, high=20),
    Option("ignore-eos", bool, False, "go on past the end-of-text token"),
)
