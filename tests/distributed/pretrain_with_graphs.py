"""scripts/pretrain_gpt.py on CPUs with the stand-in of graph_stand_in.py for CUDA graphs; a GPU has its own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_hybrid.patches import cpu_device

sys.path.insert(0, str(Path(__file__).resolve().parent))

if cpu_device.is_installed():
    import graph_stand_in

    graph_stand_in.install()
runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"), run_name="__main__")
