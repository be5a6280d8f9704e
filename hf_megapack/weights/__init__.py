"""Weights: what a LoRA adapter is made of, and how it reaches the disk and comes back.

Nothing here knows a model: functions take plain tensors under PEFT key names and local paths.
"""
