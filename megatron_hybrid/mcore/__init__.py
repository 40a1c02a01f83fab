"""The adapter to Megatron-Core: the only package that imports megatron, and only once one of its modules is used.

    versions    which Megatron-Core this works with
    layers      column- and row-parallel linears whose GEMMs follow a recipe
    norm, attention, spec      what else a GPT layer needs without Transformer Engine, and the layer spec
    modules     names and roles of the whole model's linears, from its configuration
    arguments, setup, checkpoint, metrics      flags, checks before anything is built, what checkpoints record
    recipes     `--spec megatron_hybrid.mcore.recipes NAME|PATH` for unmodified scripts
"""
