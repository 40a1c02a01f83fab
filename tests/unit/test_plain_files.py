"""Files of a model in high precision, scale state included, hold plain tensors: they load without this package."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_hybrid as mh

READ = """
import sys
sys.modules["megatron_hybrid"] = None  # importing it fails
import torch
import torch.distributed.checkpoint as dcp
state = torch.load(sys.argv[1] + "/state.pt", weights_only=True)
assert all(type(t) is torch.Tensor for t in state.values()), {n: type(t) for n, t in state.items()}
assert any(n.endswith("_history") for n in state) and any(n.endswith("fc1.weight") for n in state)
again = {n: torch.full_like(t, 7) for n, t in state.items()}
dcp.load(again, checkpoint_id=sys.argv[1] + "/dcp", no_dist=True)
assert all(torch.equal(again[n], t) for n, t in state.items())
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_save_and_distributed_checkpoint_load_without_this_package(tmp_path):
    model = mh.HybridMLP(32, 64, recipe="fp8_delayed")
    ctl = mh.prepare(model)
    ctl.begin_step(1)
    model(torch.randn(8, 32)).sum().backward()
    ctl.end_step()
    state = model.state_dict()
    torch.save(state, tmp_path / "state.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
