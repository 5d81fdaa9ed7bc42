"""Functions over tensors that run without an engine: torch and triton only, each kernel beside its eager reference."""
