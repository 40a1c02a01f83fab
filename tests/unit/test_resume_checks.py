"""What a run may go on from: a checkpoint of the same sizes and the same learning-rate schedule."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import megatron_hybrid as mh
from megatron_hybrid.mcore.checkpoint import (
    check_masters,
    check_schedule,
    check_sizes,
    check_tracker,
    nothing_to_load,
    record,
)
from megatron_hybrid.mcore.errors import UserError
from megatron_hybrid.recipe_callable import CallableRecipe


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


CONFIG = SimpleNamespace(
    num_layers=4, num_moe_experts=4, moe_layer_freq=2, moe_shared_expert_intermediate_size=None,
    hybrid_layer_pattern=None,
)  # fmt: skip
KINDS = ({}, {"ckpt_format": "torch"}, {"ckpt_format": "torch", "reshardable": True})  # state that lies as its buffers did
FREE = ({"no_load_optim": True}, {"finetune": True}, {"use_distributed_optimizer": False}, {"use_megatron_fsdp": True},
        {"reshardable": True})  # fmt: skip


def check_weights(before, now, *, reshardable=False, untied=True, **changes):
    """before: the recipe in the checkpoint, or None; now: the run's."""
    saved = arguments(untie_embeddings_and_output_weights=untied, pipeline_model_parallel_size=1)
    saved.dist_ckpt_optim_fully_reshardable = reshardable
    if before is not None:
        record(saved, before, CONFIG)
    run = {"ckpt_format": "torch_dist", "use_distributed_optimizer": True, "use_megatron_fsdp": False,
           "untie_embeddings_and_output_weights": untied, "pipeline_model_parallel_size": 1}  # fmt: skip
    check_masters(arguments(**run | changes), saved, now, CONFIG)


def living_recipe(*rules, **fields):
    """MXFP8 weights that live quantized, but for what (match, use) say."""
    rules = [{"match": match, "use": use} for match, use in rules]
    return mh.Recipe.from_dict(mh.Recipe.load("mxfp8").to_dict() | {"weights": "quantized", "rules": rules} | fields)


def test_the_optimizers_state_of_weights_that_live_otherwise_is_refused_where_it_lies_as_its_buffers_did():
    high = mh.Recipe.load("mxfp8")
    lives = high.with_weights("quantized")
    for before, now in ((high, lives), (lives, high)):
        words = f"state of `weights: {before.weights}`, this run has `weights: {now.weights}`.*--no-load-optim"
        for changes in KINDS:
            with pytest.raises(UserError, match=words):
                check_weights(before, now, **changes)
            check_weights(now, now, **changes)
        for field in FREE:
            check_weights(before, now, **field)


@pytest.mark.parametrize(
    "match, label",
    [
        ({"layers": "last:1"}, "'decoder.layers.3.self_attention.linear_qkv'"),
        ({"name": "*.linear_fc2", "layers": "2"}, "'decoder.layers.1.mlp.linear_fc2'"),
        ({"name": "*.experts.linear_fc1", "experts": "2:"}, "'decoder.layers.0.mlp.experts.linear_fc1', expert 2"),
    ],
)
def test_other_linears_that_live_quantized_are_refused_naming_the_first(match, label):
    all_of_them, but_some = living_recipe(), living_recipe((match, "high_precision"))
    formats_apart = living_recipe((match, "nvfp4"))
    for changes in KINDS:
        with pytest.raises(UserError) as caught:
            check_weights(all_of_them, but_some, **changes)
        words = f"state of a weight of {label} that lives quantized, this run has one that lives in high precision: "
        assert words in str(caught.value) and "\n" not in str(caught.value)
        words = f"of {label} that lives in high precision, this run has one that lives quantized"
        with pytest.raises(UserError, match=words):
            check_weights(but_some, all_of_them, **changes)
        check_weights(all_of_them, formats_apart, **changes)
    for field in FREE:
        check_weights(all_of_them, but_some, **field)


def test_rules_on_steps_do_not_count_and_nothing_lives_where_nothing_is_quantized():
    """Weights live as the rules without steps say; `weights: quantized` over high precision alone is no difference."""
    check_weights(living_recipe(), living_recipe(({"steps": "5:"}, "nvfp4")))
    none = living_recipe(({"name": "*"}, "high_precision"))
    check_weights(none, mh.Recipe.load("bf16"))
    check_weights(mh.Recipe.load("bf16"), none)


def test_an_output_layer_that_shares_the_embeddings_weight_has_none_that_lives():
    head, no_head = living_recipe(lm_head=True), living_recipe()
    with pytest.raises(UserError, match="of 'output_layer' that lives quantized, this run has one that lives in high"):
        check_weights(head, no_head)
    check_weights(head, no_head, untied=False)
    with pytest.raises(UserError, match="'output_layer'"):  # on a stage of its own it has one
        check_weights(no_head, head, untied=False, pipeline_model_parallel_size=2)


def test_a_checkpoint_without_a_record_has_weights_in_high_precision():
    """Megatron's own, or of a run before this package."""
    lives = living_recipe()
    for changes in KINDS:
        words = "state of `weights: high_precision` \\(it records no recipe\\), this run has `weights: quantized`"
        with pytest.raises(UserError, match=words):
            check_weights(None, lives, **changes)
        check_weights(None, mh.Recipe.load("mxfp8"), **changes)
    for field in FREE:
        check_weights(None, lives, **field)
    saved = SimpleNamespace()  # older ones, whose state is laid out by names
    run = arguments(ckpt_format="torch_dist", use_distributed_optimizer=True, use_megatron_fsdp=False)
    check_masters(run, saved, lives, CONFIG)


def by_name(role):
    return mh.HybridQuantizer("mxfp8_e4m3", "mxfp8_e4m3") if "fc1" in role.name else None


def test_a_function_says_which_weights_lived_quantized():
    """Its record has its name, and those."""
    one = CallableRecipe(by_name, weights="quantized")
    other = CallableRecipe(lambda role: None if "fc1" in role.name else by_name(role), weights="quantized")
    same = [({"name": name}, "high_precision") for name in ("*self_attention*", "*fc2")]
    check_weights(one, living_recipe(*same))
    words = "'decoder.layers.0.mlp.experts.linear_fc1', expert 0 that lives quantized, this run has one that lives in hi"
    with pytest.raises(UserError, match=words):
        check_weights(one, other)


def test_of_layers_that_are_counted_otherwise_only_the_kind_of_weights_is_compared():
    """A GPT that goes on as a hybrid model."""
    lives, some = living_recipe(), living_recipe(({"layers": "1"}, "high_precision"))
    check_weights(lives, some, hybrid_layer_pattern="*-*-")
    with pytest.raises(UserError, match="state of `weights: quantized`, this run has `weights: high_precision`"):
        check_weights(lives, mh.Recipe.load("mxfp8"), hybrid_layer_pattern="*-*-")


class TestTracker:
    def check(self, path, word, step=None):
        (path / "latest_checkpointed_iteration.txt").write_bytes(word)
        check_tracker(SimpleNamespace(load=str(path), ckpt_step=step))

    def test_what_it_names_is_there(self, tmp_path):
        for folder in ("iter_0000005", "iter_0000012", "release"):
            (tmp_path / folder).mkdir()
        for word, step in ((b"5", None), (b"12\n", None), (b"release", None), (b"release", 5), (b"99", 12)):
            self.check(tmp_path, word, step)

    @pytest.mark.parametrize("word", [b"", b"abc", b"-5", b"1.5", b"\xff\xfe"])
    def test_no_iteration_is_refused(self, tmp_path, word):
        """Megatron ends such a run with exit status 0."""
        with pytest.raises(UserError, match="latest_checkpointed_iteration.txt: an iteration or `release` is expected"):
            self.check(tmp_path, word)

    def test_one_that_is_not_there_is_refused_with_those_that_are(self, tmp_path):
        with pytest.raises(UserError, match="no iter_0000007 in it, which latest_checkpointed.* names; there: none"):
            self.check(tmp_path, b"7")
        (tmp_path / "iter_0000005").mkdir()
        with pytest.raises(UserError, match="no iter_0000009 in it, which --ckpt-step 9 names; there: iter_0000005"):
            self.check(tmp_path, b"5", 9)
        with pytest.raises(UserError, match="no release in it"):
            self.check(tmp_path, b"release")

    def test_what_is_in_no_file_system_is_left_to_megatron(self):
        check_tracker(SimpleNamespace(load="msc://profile/ckpt", ckpt_step=None))

    def test_a_copy_that_stopped_is_refused(self, tmp_path):
        folder = tmp_path / "iter_0000005"
        folder.mkdir()
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        with pytest.raises(UserError, match="cannot be read: iter_0000005 lacks its .metadata"):
            self.check(tmp_path, b"5")
        dcp.save({"w": torch.ones(64)}, checkpoint_id=folder, no_dist=True)
        self.check(tmp_path, b"5")
        (shard,) = folder.glob("*.distcp")
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1])
        with pytest.raises(UserError, match=f"cannot be read: .*distcp is cut off: {len(whole) - 1} bytes of {len(whole)}; copy"):
            self.check(tmp_path, b"5")
        shard.unlink()
        with pytest.raises(UserError, match="cannot be read: .*distcp is missing, which its .metadata names; copy it again"):
            self.check(tmp_path, b"5")
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:50])
        with pytest.raises(UserError, match="cannot be read: .*.metadata cannot be read: .*; copy it again"):
            self.check(tmp_path, b"5")

    def test_the_first_rank_looks_and_all_refuse(self, tmp_path, monkeypatch):
        (tmp_path / "iter_0000005").mkdir()
        told = []
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "broadcast_object_list", lambda found, src: told.extend(found))
        self.check(tmp_path, b"5")
        with pytest.raises(UserError, match="no iter_0000007 in it"):
            self.check(tmp_path, b"7")
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(dist, "broadcast_object_list", lambda found, src: found.__setitem__(0, told.pop(0)))
        elsewhere = SimpleNamespace(load=str(tmp_path / "not read"), ckpt_step=None)
        check_tracker(elsewhere)
        with pytest.raises(UserError, match="no iter_0000007 in it"):
            check_tracker(elsewhere)


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
