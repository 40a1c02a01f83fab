"""What a run may go on from: a checkpoint of the same sizes and the same learning-rate schedule."""

from types import SimpleNamespace

import pytest

import megatron_hybrid as mh
from megatron_hybrid.mcore.checkpoint import check_masters, check_schedule, check_sizes, nothing_to_load, record
from megatron_hybrid.mcore.errors import UserError


def arguments(**changes):
    """Megatron's arguments, as far as these checks read them."""
    found = dict(
        load="ckpt", num_layers=4, hidden_size=128, ffn_hidden_size=512, num_attention_heads=4, hybrid_layer_pattern=None,
        train_iters=100, train_samples=None, lr_decay_iters=None, lr_decay_samples=None, global_batch_size=16, lr=3e-3,
        finetune=False, no_load_optim=None, override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False,
    )  # fmt: skip
    return SimpleNamespace(**found | changes)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"])
def test_a_checkpoint_of_other_sizes_is_refused_by_flag(name):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"in ckpt is of another model: {flag} 64, this run has {flag} 96"):
        check_sizes(arguments(**{name: 96}), arguments(**{name: 64}))


def test_sizes_that_are_alike_or_unknown_are_no_hindrance():
    check_sizes(arguments(), arguments())
    check_sizes(arguments(), SimpleNamespace())  # a checkpoint of another program
    check_sizes(arguments(), None)
    check_sizes(arguments(num_layers=8, hybrid_layer_pattern="*-" * 4), arguments())  # a GPT that goes on as hybrid model


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_iters": 200}, "3200 samples, the learning rate falling from 0.003 over 3200"),
        ({"train_iters": 200, "lr_decay_iters": 100}, "3200 samples, the learning rate falling from 0.003 over 1600"),
        ({"global_batch_size": 32}, "3200 samples"),
        ({"lr": 1e-3}, "from 0.001"),
    ],
)
def test_another_schedule_is_refused_unless_told_which_to_take(changes, words):
    saved = arguments(lr_decay_iters=100)  # Megatron fills it in before it saves
    with pytest.raises(UserError, match=f"has a schedule of 1600 samples.*{words}.*--override-opt-param-scheduler"):
        check_schedule(arguments(**changes), saved)
    for flag in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "finetune", "no_load_optim"):
        check_schedule(arguments(**changes, **{flag: True}), saved)


def test_the_same_schedule_goes_on_however_it_is_given():
    check_schedule(arguments(), arguments(lr_decay_iters=100))
    by_samples = {"train_iters": None, "train_samples": 1600}
    check_schedule(arguments(**by_samples), arguments(**by_samples | {"train_iters": 100, "lr_decay_samples": 1600}))
    check_schedule(arguments(**by_samples), arguments(lr_decay_iters=100))
    check_schedule(arguments(), SimpleNamespace())
    check_schedule(arguments(), None)


def test_the_optimizers_state_of_weights_that_live_otherwise_is_refused_where_it_lies_as_its_buffers_did():
    def check(before, now, *, reshardable=False, **changes):
        saved = arguments(dist_ckpt_optim_fully_reshardable=reshardable)
        record(saved, before)
        run = {"ckpt_format": "torch_dist", "use_distributed_optimizer": True, "use_megatron_fsdp": False}
        check_masters(arguments(**run | changes), saved, now)

    high = mh.Recipe.load("mxfp8")
    lives = high.with_weights("quantized")
    for before, now in ((high, lives), (lives, high)):
        words = f"state of `weights: {before.weights}`, this run has `weights: {now.weights}`.*--no-load-optim"
        for changes in ({}, {"ckpt_format": "torch"}, {"ckpt_format": "torch", "reshardable": True}):
            with pytest.raises(UserError, match=words):
                check(before, now, **changes)
            check(now, now, **changes)
        for field in ({"no_load_optim": True}, {"use_distributed_optimizer": False}, {"use_megatron_fsdp": True}):
            check(before, now, **field)
        check(before, now, reshardable=True)


class TestNothingToLoad:
    def notes(self, path, exits=False):
        return nothing_to_load(SimpleNamespace(load=path and str(path), exit_on_missing_checkpoint=exits))

    def test_a_file_and_one_checkpoint_of_a_folder_are_refused(self, tmp_path):
        """Megatron takes them for folders without checkpoints and begins anew."""
        (tmp_path / "model.pt").touch()
        with pytest.raises(UserError, match="model.pt is a file; give the folder"):
            self.notes(tmp_path / "model.pt")
        (tmp_path / "iter_0000120").mkdir()
        with pytest.raises(UserError, match="iter_0000120 is one checkpoint; .* --ckpt-step 120"):
            self.notes(tmp_path / "iter_0000120")

    def test_a_folder_without_a_finished_checkpoint_is_begun_anew(self, tmp_path):
        (note,) = self.notes(tmp_path / "nowhere")
        assert note.startswith(f"note: no checkpoint in {tmp_path}/nowhere: the run begins anew")
        (tmp_path / "iter_0000010").mkdir()
        (note,) = self.notes(tmp_path)
        assert "that was finished, only iter_0000010: the run begins anew" in note

    def test_nothing_is_said_where_nothing_is_to_be_loaded_or_megatron_ends(self, tmp_path):
        assert self.notes(None) == self.notes(tmp_path, exits=True) == []
