"""The inference engine: a pure decision core, trio actors, the models and their kernels."""
