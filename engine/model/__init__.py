"""Models on torch: loading, the paged forward, sampling."""
