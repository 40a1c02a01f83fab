"""A run over gloo that ends well ends its process groups itself; one that fails leaves them to the end of the process."""

import pytest
import torch.distributed as dist

from megatron_hybrid.launch import ending_groups


@pytest.fixture
def group(tmp_path):
    """The default group of one rank over gloo, and another."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    dist.new_group([0])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("code", [None, 0])
def test_groups_end_with_a_run_that_ended_well(group, code):
    with pytest.raises(SystemExit), ending_groups():  # as Megatron leaves at an exit interval
        raise SystemExit(code)
    assert not dist.is_initialized()


def test_groups_end_with_a_script_that_comes_to_its_end(group):
    with ending_groups():
        pass
    assert not dist.is_initialized()
    with ending_groups():  # one that has ended its groups, or had none
        pass


@pytest.mark.parametrize("error", [SystemExit(2), RuntimeError("a failure")])
def test_a_failure_does_not_wait_for_other_ranks(group, error):
    with pytest.raises(type(error)), ending_groups():
        raise error
    assert dist.is_initialized()


def test_groups_of_other_backends_are_left_alone(group, monkeypatch):
    """CUDA graphs may still hold NCCL's communicators."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    with ending_groups():
        pass
    assert dist.is_initialized()
