"""Fine-tune chat and agent models with LoRA on Megatron-Core, computing every shared prefix once.

Importing this package patches nothing, starts no CUDA and loads no Megatron: each public name is fetched from its room
when it is first used.
"""

import importlib

_HOME = {
    "MegaPackTrainer": "trainer",
    "MegaPackConfig": "config",
    "ChatTransform": "data.chat",
    "preview": "data.preview",
    "PrefixTreeCollator": "data.collator",
    "PackingReport": "packing.report",
    "export_peft_adapter": "weights.export",
    "MegaPackError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "BackendError": "errors",
    "NonFiniteResultError": "errors",
    "ExportError": "errors",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
