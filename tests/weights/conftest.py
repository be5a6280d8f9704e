"""What the tests of adapters of dense models share."""

import pytest

from hf_megapack.weights import export_peft_adapter
from tests.helpers.dense_adapters import OLD, REPLACEMENTS, random_adapter


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Directories with the old and each new adapter, and what readers find in them."""
    root = tmp_path_factory.mktemp("prepared")
    states = {"old": (random_adapter(OLD, seed=1), OLD)}
    states |= {name: (random_adapter(config, seed=2), config) for name, config in REPLACEMENTS.items()}
    for name, (state, config) in states.items():
        export_peft_adapter(state, config, root / name, base_model_name="m")
        (root / name / "tokenizer.json").write_text("{}")
    return root, states
