"""What `scripts/benchmark.py` measures: a module each for training, the loss, decoding, loading and growth."""
