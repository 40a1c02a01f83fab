"""A recipe as a Python function, which test_mcore_train names on the command line: what `mxfp8` does."""

import megatron_hybrid as mh


def hybrid(role):
    return None if role.module_type == "dpa" else mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3")
