"""Safetensors checkpoints as files: headers, index, configs, byte-range reader, streaming writer. Knows no model."""
