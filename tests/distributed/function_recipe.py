"""Recipes as Python functions, which tests name on the command line."""

import megatron_hybrid as mh


def hybrid(role):
    """What `mxfp8` does."""
    return None if role.module_type == "dpa" else mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3")


WIDE = "fp8_delayed_e5m2:history=2,margin=2"


def wide(role):
    """Delayed scales 32 times those of E4M3."""
    return None if role.module_type == "dpa" else mh.HybridQuantizer(WIDE, WIDE)
