"""Text to tokens, and examples to batches."""
