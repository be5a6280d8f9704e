"""The only room that imports Megatron-Core; its one door is `hf_megapack.megatron.backend.MegatronBackend`."""
