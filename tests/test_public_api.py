"""The names, signatures and import behaviour that users rely on."""

import inspect
import subprocess
import sys

import pytest
import transformers

import hf_megapack
from hf_megapack import errors
from hf_megapack.arguments import TRAINER_ARGUMENTS
from hf_megapack.trainer import MegaPackTrainer

TRAINER_ORDER = [
    "model",
    "args",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "compute_loss_func",
    "compute_metrics",
    "callbacks",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics",
    "quantization_config",
    "peft_config",
    "formatting_func",
]


def test_all_names_resolve_and_are_listed():
    expected = {
        "MegaPackTrainer",
        "MegaPackConfig",
        "PrefixTreeCollator",
        "ChatTransform",
        "preview",
        "export_peft_adapter",
        "PackingReport",
        "MegaPackError",
        "ConfigError",
        "DataError",
        "BackendError",
        "NonFiniteResultError",
        "ExportError",
    }
    assert set(hf_megapack.__all__) == expected
    assert expected <= set(dir(hf_megapack))
    for name in expected:
        assert getattr(hf_megapack, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_megapack.nothing


def test_trainer_parameters_have_trl_order():
    parameters = list(inspect.signature(MegaPackTrainer.__init__).parameters)[1:]
    assert parameters == [*TRAINER_ORDER, "other"]
    sft_trainer = pytest.importorskip("trl", reason="trl is not installed").SFTTrainer
    assert list(inspect.signature(sft_trainer.__init__).parameters)[1:] == TRAINER_ORDER


def test_every_trainer_parameter_has_a_verdict():
    of_transformers = set(inspect.signature(transformers.Trainer.__init__).parameters) - {"self"}
    assert (of_transformers | set(TRAINER_ORDER)) - set(TRAINER_ARGUMENTS) == set()


def test_errors_are_also_what_a_caller_would_catch():
    builtin = {
        "ConfigError": ValueError,
        "DataError": ValueError,
        "BackendError": RuntimeError,
        "NonFiniteResultError": ArithmeticError,
        "ExportError": RuntimeError,
    }
    for name, parent in builtin.items():
        assert issubclass(getattr(errors, name), (errors.MegaPackError))
        assert issubclass(getattr(errors, name), parent)


IMPORT_PROBE = """
import sys, logging, warnings
root_handlers, filters = list(logging.root.handlers), list(warnings.filters)
import {module}
assert logging.root.handlers == root_handlers
loaded = [name for name in ("megatron", "megatron.core", "transformer_engine") if name in sys.modules]
assert not loaded, loaded
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
if "{module}" == "hf_megapack":
    assert torch is None, "the bare package needs no torch"
"""


@pytest.mark.parametrize("module", ["hf_megapack", "hf_megapack.trainer"])
def test_importing_loads_no_megatron_and_starts_no_cuda(module):
    subprocess.run([sys.executable, "-c", IMPORT_PROBE.format(module=module)], check=True, timeout=120)
