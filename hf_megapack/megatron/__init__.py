"""The only room that imports Megatron-Core; its one door is `hf_megapack.megatron.backend.MegatronBackend`.

Importing this room loads Megatron-Core, without the warnings that it gives about optional packages: which
implementation runs is chosen in `model.py`, not by what happens to be installed.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.pipeline_parallel  # noqa: F401 (imported here for their warnings)
