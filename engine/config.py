"""The engine's options and what they mean together. Imports no torch: `check`, the twin and the actors read it too."""

from __future__ import annotations

from engine.options import Option

ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("layout", str, "tp1dp1ep1", "tpXdpYepZ: X*Y worker processes, ep divides X*Y; dp are attention data-parallel ranks in lock-step",
           ("--parallel-layout",)),
    Option("nnodes", int, 1, "machines of one replica; each runs the same command with its own --node-rank, and its share of the ranks",
           low=1, high=65536),
    Option("node-rank", int, 0, "this machine's number; 0 also serves", low=0, high=65535),
    Option("master-addr", str, "", "address or name of the machine with --node-rank 0. Torch's connections between the nodes "
           "are neither encrypted nor authenticated: use a trusted network"),
    Option("master-port", int, 29500, "port where the nodes meet at --master-addr; never opened with --nnodes 1", low=1, high=65535),
    Option("rank-policy", str, "shortest-queue", "which DP rank takes a request", ("--dp-policy",),
           choices=("shortest-queue", "round-robin", "prefix-aware")),
    Option("dtype", str, "auto", "compute dtype; auto is bfloat16, for V4.1 on a CPU float32", choices=("auto", "bfloat16", "float32")),
    Option("device", str, "auto", "cpu, cuda or cuda:N; auto takes a GPU where there is one"),
    Option("num-threads", int, None, "CPU threads of a worker; auto is every core", low=1, high=1024),
    Option("block-size", int, 128, "tokens per KV block", ("--page-size",), low=1, high=65536),
    Option("max-total-tokens", int, None, "KV capacity in tokens; auto fits the memory budget", low=1, high=1 << 34),
    Option("mem-fraction-static", float, 0.85, "share of free memory for weights and KV; on a CPU a quarter of it, at most 1 GiB of KV",
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
    Option("engram", str, "gpu", "Engram tables: rows spread over the ranks' devices, whole on each, or in host memory",
           choices=("gpu", "replicated", "host")),
    Option("redundant-experts", int, 0, "extra copies of busy experts in the backbone; a multiple of ep", low=0, high=65536),
    Option("draft-redundant-experts", int, 0, "extra copies of busy experts in the draft; a multiple of ep", low=0, high=65536),
    Option("expert-rebalancing", bool, False, "move experts between ranks while serving, where measured loads make it pay", ("--eplb",)),
    Option("report-steps", int, 256, "steps between the ranks' reports of expert loads, message bytes and Engram waits",
           low=1, high=1 << 20),
    Option("forced-acceptance", float, None, "for measurements: drafts accepted per verification on average, the bonus token not counted, "
           "whatever the model says; the tokens are then not its own choice, and structured output is refused; auto lets the model decide",
           low=0, high=64),
    Option("forced-routing", str, "model", "for measurements: tokens dealt out evenly over the experts, or all to the same few, whatever "
           "the router says; the tokens are then not the model's own", choices=("model", "balanced", "imbalanced")),
    Option("load-format", str, "auto", "auto reads the checkpoint; random makes seeded weights of its shapes", choices=("auto", "random")),
    Option("random-seed", int, None, "seeds requests that bring no seed, and random weights; auto draws the former", low=0, high=2**63 - 1),
    Option("record-trace", str, "", "folder (new or empty) for a recording of steps: plans, component times, environment, and kernels with "
           "--record-mode profile. twinfer trace import reads the latter, twinfer calibrate --from the times. Begins after the warm-up"),
    Option("record-mode", str, "profile", "profile: every kernel and operator, which slows the steps; timers: component times alone, cheap "
           "enough for service", choices=("profile", "timers")),
    Option("record-steps", int, None, "steps recorded; auto is 32 of profile, 2000 of timers", low=1, high=10000),
    Option("on-worker-death", str, "exit", "after a worker's death; its requests end with an error", choices=("exit", "restart")),
    Option("heartbeat-timeout", float, 10.0, "seconds without a sign of life before a worker counts as dead", low=0.1, high=3600),
    Option("step-timeout", float, 600.0, "seconds a step may take before its worker counts as hung", low=0.1, high=86400),
    Option("collective-timeout", float, 60.0, "seconds a rank waits for its peers in a collective; at most 0.8 of --step-timeout",
           low=0.1, high=86400),
    Option("start-timeout", float, 900.0, "seconds a worker may take to load", low=0.1, high=86400),
    Option("shutdown-timeout", float, 30.0, "seconds running requests get to finish after the first stop signal",
           ("--graceful-timeout",), low=0.0, high=86400),
)  # fmt: skip

SAMPLING_OPTIONS: tuple[Option, ...] = (
    Option("max-tokens", int, 128, "tokens to generate at most", ("--max-new-tokens", "--max-completion-tokens"), low=1, high=1 << 24),
    Option("min-tokens", int, 0, "no end of text before this many tokens", low=0, high=1 << 24),
    Option("temperature", float, 0.0, "0 is greedy", ("--temp",), low=0.0, high=100.0),
    Option("top-p", float, 1.0, "nucleus: smallest set of tokens with this probability", low=1e-9, high=1.0),
    Option("top-k", int, 0, "keep the k likeliest tokens; 0 keeps all", low=0, high=1 << 31),
    Option("min-p", float, 0.0, "drop tokens below this share of the likeliest one", low=0.0, high=1.0),
    Option("repetition-penalty", float, 1.0, "divides the logits of seen tokens", low=1e-6, high=100.0),
    Option("presence-penalty", float, 0.0, "subtracted once from generated tokens' logits", low=-2.0, high=2.0),
    Option("frequency-penalty", float, 0.0, "subtracted per occurrence from generated tokens' logits", low=-2.0, high=2.0),
    Option(
        "seed",
        int,
        None,
        "seed of the sampler; auto draws one. Repeats a text in the same batch; in another one only up to rounding",
        low=0,
        high=2**63 - 1,
    ),
    Option("logprobs", int, None, "log-probabilities of the chosen and the N likeliest tokens (with --json)", low=0, high=20),
    Option("ignore-eos", bool, False, "go on past the end-of-text token"),
)

SERVE_OPTIONS: tuple[Option, ...] = (
    Option("host", str, "127.0.0.1", "address to listen on; 0.0.0.0 and :: are every interface"),
    Option("port", int, 8000, "port to listen on; 0 takes a free one", low=0, high=65535),
    Option("served-model-name", str, (), "name(s) of the model in the API; none is the model's own. May be repeated", many=True),
    Option("api-key", str, (), "key(s) of clients, sent as 'Authorization: Bearer KEY'; visible to who lists processes: prefer "
           "--api-key-file. May be repeated", many=True, secret=True),
    Option("api-key-file", str, "", "file with one key a line; lines that begin with # are skipped"),
    Option("allowed-hosts", str, (), "names that clients may call the server by, beside localhost; * is every name. Without it a server "
           "on a loopback address answers to localhost only, another one to every name", ("--allowed-host",), many=True),
    Option("public-metrics", bool, False, "/metrics without a key"),
    Option("metrics-compat", str, "none", "repeat the metrics under another engine's names", choices=("none", "vllm", "sglang")),
    Option("thinking", str, "auto", "reasoning of models that can switch it; auto is the model's own default, requests may say otherwise",
           choices=("auto", "on", "off")),
    Option("max-body-size", int, 64 << 20, "bytes of a request's body", low=1024, high=1 << 30),
    Option("request-timeout", float, 3600.0, "seconds a whole request may take", low=0.1, high=7 * 86400),
    Option("client-timeout", float, 30.0, "seconds a client may take to send its request, and may leave output untaken",
           low=0.1, high=3600),
    Option("keep-alive-timeout", float, 75.0, "seconds an idle connection is kept open", ("--timeout-keep-alive",), low=0.1, high=3600),
    Option("max-connections", int, 4096, "open connections; more wait for one to close", low=1, high=65536),
    Option("no-warm-up", bool, False, "be ready without the short generations that exercise the engine first", ("--skip-server-warmup",)),
    Option("log-format", str, "text", "json makes every line of the log one JSON object", choices=("text", "json")),
    Option("stats-interval", float, 10.0, "seconds between lines of the engine's load while there is any; 0 for none", low=0.0, high=86400),
    Option("log-requests", bool, False, "a line for each request (never its text)", ("--enable-log-requests",)),
    Option("ssl-certfile", str, "", "certificate chain (PEM): serve HTTPS"),
    Option("ssl-keyfile", str, "", "the certificate's key (PEM); none is in the certificate's file"),
    Option("calibration", str, "", "what calibrate wrote for this model and machine: each step's time is predicted before it runs, "
           "compared, and watched for drift (/metrics, /server_info, log)"),
    Option("calibration-correction", bool, False, "multiply predictions by what the last steps took beside them"),
    Option("tpot-slo", float, None, "ms that a running request may wait for its next token by the calibration's prices: prompt chunks and "
           "admissions are kept within; auto: no limit", low=0.01, high=1e6),
    Option("no-progress", bool, False, "no bars or percentages while the model loads", ("--disable-progress",)),
)  # fmt: skip
