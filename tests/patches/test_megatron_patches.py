"""The patches on the installed Megatron: in, out, and doing what their names say."""

import signal
import subprocess
import sys
import types
import warnings

import psutil
import pytest
import torch

from megatron_hybrid import patches
from megatron_hybrid.optimizer import FusedAdam, OffloadedAdam
from megatron_hybrid.patches import multi_tensor, offload_on_cpu, save_errors
from megatron_hybrid.patches.framework import APPLIED, NOT_APPLIED, NOT_NEEDED, PatchError


@pytest.fixture
def without_patches():
    """Start without them and leave the process as it was found."""
    before = [status.name for status in patches.statuses() if status.state == APPLIED]
    patches.revert_all()
    yield
    patches.revert_all()
    patches.apply_all(before)


def test_every_patch_fits_the_installed_megatron():
    for status in patches.statuses():
        assert status.state in (APPLIED, NOT_APPLIED, NOT_NEEDED), str(status)
        assert status.why and status.remove_when and status.targets


def test_apply_all_and_revert_all(without_patches):
    with patches.quiet_missing_te_warnings():
        import megatron.core.datasets.utils as datasets
        import megatron.core.optimizer as optimizer
        from megatron.core.optimizer import clip_grads, distrib_optimizer
    originals = optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE, clip_grads.l2_norm_impl
    if not optimizer.USING_PYTORCH_OPTIMIZER:
        pytest.skip("Transformer Engine or Apex is installed")
    statuses = patches.apply_all()
    assert [status.name for status in statuses] == list(patches.PATCHES)
    assert all(status.state in (APPLIED, NOT_NEEDED) for status in statuses)
    assert optimizer.Adam is FusedAdam and distrib_optimizer.Adam is FusedAdam
    assert optimizer.USING_PYTORCH_OPTIMIZER is False and distrib_optimizer.HAVE_APEX_OR_TE is True
    assert clip_grads.l2_norm_impl is multi_tensor.l2_norm
    assert datasets.compile_helpers() is None
    assert patches.apply_all() == statuses
    patches.revert_all()
    assert (optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE, clip_grads.l2_norm_impl) == originals


def test_offload_is_built_by_megatron_where_it_was_asked_for(without_patches):
    with patches.quiet_missing_te_warnings():
        import megatron.core.optimizer as optimizer
        from megatron.core.optimizer import distrib_optimizer
    from megatron_hybrid.mcore import host_optimizer

    patches.apply_all()
    patch = host_optimizer.patch()
    patch.apply()
    try:
        assert optimizer.Adam is distrib_optimizer.Adam is OffloadedAdam
    finally:
        patch.revert()
    assert optimizer.Adam is FusedAdam


def test_the_stand_in_of_two_devices():
    """Everything is on the device but what `.cpu()` gave and what was made of that."""
    with offload_on_cpu.TwoDevices():
        tensor = torch.randn(3)
        host = tensor.detach().clone().cpu()
        assert tensor.is_cuda and tensor.clone().is_cuda and not host.is_cuda and not host.double().clone().is_cuda
    assert not tensor.is_cuda


def test_apply_all_is_all_or_nothing(without_patches, monkeypatch):
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl.__module__ != "megatron.core.utils":
        pytest.skip("Transformer Engine or Apex is installed")
    monkeypatch.delattr(clip_grads, "multi_tensor_scale_impl")
    with pytest.raises(PatchError, match="clip_grads:multi_tensor_scale_impl.*no such symbol"):
        patches.apply_all()
    assert not any(patch.is_applied for patch in patches.PATCHES.values())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown patch nothing; there are: compile_helpers"):
        patches.apply_all(["nothing"])


def test_norm_equals_torch():
    tensors = [torch.randn(5), torch.randn(3, 4), torch.full((2,), 1e-3).bfloat16()]
    total, each = multi_tensor.applier(multi_tensor.l2_norm, None, [tensors], True)
    expected = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm()
    assert total.shape == (1,) and total.dtype == torch.float32
    torch.testing.assert_close(total[0].double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(each[1], tensors[1].norm())
    assert multi_tensor.l2_norm(0, None, [tensors], False)[1] is None


@pytest.mark.parametrize("factor", [1.0, 0.3, torch.tensor([0.3])])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("destination", [torch.float32, torch.bfloat16])
def test_scale_rounds_once(factor, source, destination):
    sources = [torch.randn(6).to(source), torch.randn(2, 3).to(source)]
    kept = [tensor.clone() for tensor in sources]
    outputs = [torch.empty_like(tensor, dtype=destination) for tensor in sources]
    multi_tensor.applier(multi_tensor.scale, None, [sources, outputs], factor)
    for output, tensor in zip(outputs, kept, strict=True):
        assert torch.equal(output, (tensor.float() * factor).to(destination))
    for tensor, original in zip(sources, kept, strict=True):
        assert torch.equal(tensor, original)


def test_scale_in_place():
    tensors = [torch.ones(3), torch.ones(2)]
    multi_tensor.scale(0, None, [tensors, tensors], 0.5)
    assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in tensors)
    multi_tensor.scale(0, None, [[], []], 0.5)


def test_only_the_expected_warnings_are_hidden():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with patches.quiet_missing_te_warnings():
            warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
            warnings.warn("Apex is not installed. Falling back to Torch Norm")
            warnings.warn("something else")
        warnings.warn("Apex is not installed. Falling back to Torch Norm")
    assert [str(warning.message).split(".")[0] for warning in seen] == ["something else", "Apex is not installed"]


KILLED = """
import os, signal
from megatron_hybrid import patches
if __name__ == "__main__":
    patches.apply_all(["save_process"])
    from megatron.core.dist_checkpointing.strategies import filesystem_async as writers
    queue = writers.get_write_results_queue()
    assert writers.get_write_results_queue() is queue
    queue.put({"reported": 1})
    assert queue.get() == {"reported": 1}
    import multiprocessing
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_saves_start_ends_with_a_rank_that_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    started = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    (child,) = map(int, started.stdout.readline().split())
    left = psutil.Process(child) if psutil.pid_exists(child) else None
    assert started.wait(60) == -signal.SIGKILL
    assert left is None or not psutil.wait_procs([left], timeout=20)[1]


def test_a_failed_save_names_cause_and_rank_and_leaves_nothing(monkeypatch, tmp_path):
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    training_args = types.SimpleNamespace(save=str(tmp_path), rank=0)
    monkeypatch.setattr("megatron.training.get_args", lambda: training_args)
    half, whole = tmp_path / "iter_0000004", tmp_path / "iter_0000006"
    for folder in (half, whole):
        folder.mkdir()
        (folder / "__0_0.distcp").write_text("a part")
    (whole / ".metadata").write_text("all of it")

    def save(iteration, error):
        raise error

    failed = CheckpointException("write", {3: _wrap_exception(RuntimeError("Worker failure, error: cannot write x: full"))})
    saves = save_errors.naming_the_cause(save)
    with pytest.raises(save_errors.CannotSave) as caught:
        saves(4, failed)
    said = "the checkpoint of iteration 4 cannot be written: cannot write x: full (rank 3); what was written of it is removed"
    assert str(caught.value) == said and not caught.value.alone and not half.exists()
    with pytest.raises(save_errors.CannotSave, match="of iteration 6 cannot be written: .*rank 3.$"):
        saves(6, failed)
    assert whole.exists()
    half.mkdir()
    with pytest.raises(save_errors.CannotSave, match="of iteration 4 cannot be written: .* No space left") as caught:
        saves(4, OSError(28, "No space left on device"))  # of one rank: others may still be writing
    assert caught.value.alone and half.exists()
    with pytest.raises(KeyError):
        saves(4, KeyError())
