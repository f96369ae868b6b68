"""tiny-v41: a small DeepSeek-V4.1 trained from scratch in this repository, and an independent full-sequence forward pass.

Nothing here is used in service: the forward pass has no cache, is differentiable, and serves as a second witness for the
serving path. ``python -m engine.model.tiny_v41.train`` makes the files of ``engine/model/assets/tiny-v41``.
"""
