"""Hugging Face folders in and out, without Megatron: files, names, layouts, refusals (case 66)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_hybrid.checkpoint_file import Checkpoint, CheckpointError
from megatron_hybrid.cli import main
from megatron_hybrid.convert import safetensors_file
from megatron_hybrid.convert.hf import export, import_hf, join_qkv, split_qkv
from megatron_hybrid.convert.model_spec import _REQUIRED, _REQUIRED_OF_EXPERTS, ConversionError, ModelSpec
from megatron_hybrid.convert.safetensors_file import Reader, SafetensorsError, save, save_sharded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_reference import PlainModel  # noqa: E402

LLAMA = ModelSpec(num_layers=2, hidden=32, heads=4, groups=2, head_size=8, ffn=48, vocab=50, max_positions=64, norm_eps=1e-5,
                  rope_base=10000.0, dtype=torch.bfloat16, moe_layers=(False, False))  # fmt: skip
SPECS = {
    "llama": LLAMA,
    "llama_tied": replace(LLAMA, tied=True, groups=4, head_size=16),
    "llama3.1": replace(LLAMA, rope_base=500000.0, rope_factor=8.0, head_size=16),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen2_moe": replace(LLAMA, qkv_bias=True, experts=3, expert_ffn=16, topk=2, shared_ffn=24, moe_layers=(True, True)),
    "qwen3": replace(LLAMA, qk_norm=True, rope_base=1e6),
    "qwen3_moe": replace(LLAMA, qk_norm=True, experts=3, expert_ffn=16, topk=2, moe_layers=(True, True)),
    "qwen3_moe_mixed": replace(
        LLAMA, qk_norm=True, experts=3, expert_ffn=16, topk=2, moe_layers=(False, True), renormalize=False
    ),  # fmt: skip
}


def hf_shapes(s: ModelSpec) -> dict[str, tuple[int, ...]]:
    """What a folder of this model holds, written from the Hugging Face side."""
    shapes = {"model.embed_tokens.weight": (s.vocab, s.hidden), "model.norm.weight": (s.hidden,)}
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)

    def mlp(at, ffn):
        return {f"{at}gate_proj.weight": (ffn, s.hidden), f"{at}up_proj.weight": (ffn, s.hidden),
                f"{at}down_proj.weight": (s.hidden, ffn)}  # fmt: skip

    for i in range(s.num_layers):
        at = f"model.layers.{i}."
        q, kv = s.heads * s.head_size, s.groups * s.head_size
        shapes |= {f"{at}input_layernorm.weight": (s.hidden,), f"{at}post_attention_layernorm.weight": (s.hidden,),
                   f"{at}self_attn.q_proj.weight": (q, s.hidden), f"{at}self_attn.k_proj.weight": (kv, s.hidden),
                   f"{at}self_attn.v_proj.weight": (kv, s.hidden), f"{at}self_attn.o_proj.weight": (s.hidden, q)}  # fmt: skip
        if s.qkv_bias:
            shapes |= {f"{at}self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
        if s.qk_norm:
            shapes |= {f"{at}self_attn.{x}_norm.weight": (s.head_size,) for x in "qk"}
        if not s.moe_layers[i]:
            shapes |= mlp(f"{at}mlp.", s.ffn)
            continue
        shapes[f"{at}mlp.gate.weight"] = (s.experts, s.hidden)
        if s.shared_ffn:
            shapes |= mlp(f"{at}mlp.shared_expert.", s.shared_ffn) | {f"{at}mlp.shared_expert_gate.weight": (1, s.hidden)}
        for e in range(s.experts):
            shapes |= mlp(f"{at}mlp.experts.{e}.", s.expert_ffn)
    return shapes


def make_folder(folder: Path, spec: ModelSpec, seed: int = 0) -> Path:
    folder.mkdir()
    g = torch.Generator().manual_seed(seed)
    save(
        folder / "model.safetensors",
        {n: (0.1 * torch.randn(s, generator=g)).bfloat16() for n, s in hf_shapes(spec).items()},
    )
    (folder / "config.json").write_text(json.dumps(spec.hf_config()))
    return folder


def same_folders(a: Path, b: Path) -> None:
    ra, rb = Reader(a), Reader(b)
    assert sorted(ra) == sorted(rb)
    assert all(torch.equal(ra.get(name), rb.get(name)) for name in ra)


@pytest.mark.parametrize("name", SPECS)
def test_c66_in_and_out_again_is_the_same_folder(name, tmp_path, capsys):
    spec = SPECS[name]
    folder = make_folder(tmp_path / "hf", spec)
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--vocab-multiple", "16"]) == 0
    assert "--finetune" in capsys.readouterr().out
    checkpoint = Checkpoint(tmp_path / "ckpt")
    assert ModelSpec.from_args(checkpoint.args, "here") == replace(spec, vocab=64)
    assert checkpoint.tensors()["embedding.word_embeddings.weight"] == (64, 32)
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "back"), "--vocab-size", "50"]) == 0
    same_folders(folder, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == spec.hf_config()
    assert ModelSpec.from_hf(spec.hf_config(), "here") == spec
    tokens = torch.arange(12).reshape(2, 6)
    assert PlainModel(tmp_path / "back", torch.float32)(tokens).shape == (2, 6, 50)


@pytest.mark.parametrize("name", SPECS)
def test_transformers_reads_it(name, tmp_path):
    """In a process of its own, as transformers brings much along; FP32 both, so only the order of sums differs."""
    pytest.importorskip("transformers")
    folder = make_folder(tmp_path / "hf", SPECS[name])
    program = (
        "import sys, torch, transformers; m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32);"
        "logits = m(torch.arange(24).reshape(2, 12) % 50).logits.detach();"
        "torch.save([logits, m.model.rotary_emb.inv_freq], sys.argv[2])"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", program, folder, tmp_path / "logits.pt"], check=True, env=environment, timeout=120
    )
    found, frequencies = torch.load(tmp_path / "logits.pt")
    model = PlainModel(folder, torch.float32)
    torch.testing.assert_close(found, model(torch.arange(24).reshape(2, 12) % 50), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(frequencies, model.frequencies(), rtol=1e-5, atol=0)


# what published folders say, as far as it matters here
PUBLISHED = {
    "Llama 3.1 8B": {
        "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "Qwen 2.5 0.5B": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 24, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936,
    },
    "Qwen 1.5 MoE A2.7B": {
        "model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "max_position_embeddings": 8192,
        "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    },
}  # fmt: skip


def test_the_printed_flags_build_the_model_of_published_configs():
    """Through Megatron's own parser, in a process of its own."""
    specs = {**SPECS, **{name: ModelSpec.from_hf(config, name) for name, config in PUBLISHED.items()}}
    assert [specs[name].kind for name in PUBLISHED] == ["llama", "qwen2", "qwen2_moe"]
    assert specs["Llama 3.1 8B"].rope_factor == 8 and specs["Qwen 2.5 0.5B"].qkv_bias and not specs["Llama 3.1 8B"].qkv_bias
    program = (
        "import argparse, json, sys\nfrom megatron.training.arguments import add_megatron_arguments\n"
        "from megatron_hybrid.mcore.arguments import add_arguments\nfrom megatron_hybrid.convert.model_spec import ModelSpec\n"
        "parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), on_cpu=True)\n"
        "for name, vocab, flags in json.loads(sys.argv[1]):\n"
        "    print('SPEC', ModelSpec.from_args({**vars(parser.parse_args(flags)), 'padded_vocab_size': vocab}, name))\n"
        "print('NAMES', *vars(parser.parse_args(['--apply-layernorm-1p'])))\n"
    )
    given = json.dumps([[name, spec.vocab, spec.flags()] for name, spec in specs.items()])
    done = subprocess.run([sys.executable, "-c", program, given], capture_output=True, text=True, timeout=120)
    found = [line.removeprefix("SPEC ") for line in done.stdout.splitlines() if line.startswith("SPEC ")]
    assert found == [str(spec) for spec in specs.values()], done.stderr[-2000:]
    # Megatron's names of what is read: a name that it does not have would leave a default in its place
    read = {name for spec in specs.values() for name in spec.to_args()} | set(_REQUIRED) | set(_REQUIRED_OF_EXPERTS)
    names = next(line for line in done.stdout.splitlines() if line.startswith("NAMES")).split()
    assert not read - {"params_dtype", "padded_vocab_size"} - set(names) and "layernorm_zero_centered_gamma" in names


def test_norms_kept_minus_one_are_refused_in_bf16_and_their_epsilon_is_the_models(tmp_path):
    args = {**LLAMA.to_args(), "layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-6}
    spec = ModelSpec.from_args(args, "here")
    assert spec.one_centered_norm and spec.norm_eps == 1e-6
    import_hf(make_folder(tmp_path / "hf", LLAMA), tmp_path / "ckpt")
    checkpoint = Checkpoint(tmp_path / "ckpt")
    checkpoint._common["args"].layernorm_zero_centered_gamma = True
    with pytest.raises(ConversionError, match="--apply-layernorm-1p"):
        export(checkpoint, tmp_path / "out")


def test_a_shared_expert_without_a_gate_is_refused():
    args = {**SPECS["qwen2_moe"].to_args(), "moe_shared_expert_gate": False}
    with pytest.raises(ConversionError, match="here: a shared expert without --moe-shared-expert-gate"):
        ModelSpec.from_args(args, "here")


def test_query_key_value_are_runs_of_a_group():
    """Two groups of two heads: Megatron's rows are q0 q1 k0 v0 q2 q3 k1 v1."""
    s = replace(LLAMA, head_size=1, hidden=1)
    q, k, v = split_qkv(torch.arange(8.0)[:, None], s)
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])
    assert join_qkv(q, k, v, s).ravel().tolist() == list(range(8))


def test_files_are_those_of_the_safetensors_package(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(4),
        "c": torch.randn(2, 2).T,
        "d": torch.empty(0, 3),
    }
    save(tmp_path / "ours.safetensors", tensors)
    theirs = safetensors.load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(tensors[n], theirs[n]) for n in tensors)


def test_many_files_have_an_index(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    save_sharded(tmp_path, tensors.items(), max_bytes=90)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        safetensors_file.INDEX]  # fmt: skip
    index = json.loads((tmp_path / safetensors_file.INDEX).read_text())
    assert index["metadata"]["total_size"] == 200 and index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    reader = Reader(tmp_path)
    assert all(torch.equal(reader.get(n), t) for n, t in tensors.items()) and reader.shape("t0") == (10,)


REFUSED = {
    "normalization": ("LayerNorm", "normalization = 'LayerNorm'; only 'RMSNorm' converts"),
    "swiglu": (False, "swiglu = False"),
    "add_bias_linear": (True, "add_bias_linear"),
    "position_embedding_type": ("learned_absolute", "position_embedding_type"),
    "qk_layernorm": (False, "experts without --qk-layernorm"),
    "add_qkv_bias": (True, "--qk-layernorm beside --add-qkv-bias"),
    "moe_shared_expert_intermediate_size": (64, "--qk-layernorm beside a shared expert"),
    "rotary_seq_len_interpolation_factor": (2, "rotary_seq_len_interpolation_factor"),
    "moe_router_score_function": ("sigmoid", "moe_router_score_function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_a_counterpart_are_refused_by_argument(name):
    value, says = REFUSED[name]
    args = {**SPECS["qwen3_moe"].to_args(), name: value}
    with pytest.raises(ConversionError, match=f"^here: .*{says}"):
        ModelSpec.from_args(args, "here")


@pytest.mark.parametrize(
    "changes, says",
    [({"model_type": "gpt2"}, "model_type 'gpt2'; these convert: llama, qwen2, qwen3, qwen2_moe, qwen3_moe"),
     ({"attention_bias": True}, "attention_bias = True"), ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
     ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
     ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192}}, "low_freq_factor")],
)  # fmt: skip
def test_configs_without_a_counterpart_are_refused(changes, says):
    with pytest.raises(ConversionError, match=says):
        ModelSpec.from_hf({**LLAMA.hf_config(), **changes}, "here")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
        ({"hidden_size": None}, "hidden_size must be a whole number above zero, found None"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number above zero, found '64'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be .* found -1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be .* found 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be .* found 0"),
        ({"max_position_embeddings": True}, "max_position_embeddings must be .* found True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above zero, found nan"),
        ({"rope_theta": "high", "rope_parameters": None}, "rope_theta must be a number"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\] does not convert"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is a list of layers, found 3"),
        ({"torch_dtype": "float99"}, "torch_dtype = 'float99': no such dtype"),
    ],
)
def test_configs_that_say_nonsense_are_refused_by_name(changes, says):
    with pytest.raises(ConversionError, match=f"^here: {says}"):
        ModelSpec.from_hf({**LLAMA.hf_config(), **changes}, "here")


def test_damaged_folders_are_refused_by_file(tmp_path):
    """A config that is no JSON, or a list; an index or a header that is something else, or points beyond its file."""
    folder = make_folder(tmp_path / "hf", LLAMA)
    config, weights, index = (folder / name for name in ("config.json", "model.safetensors", "model.safetensors.index.json"))
    good = config.read_text()
    for text, says in (("", "not JSON"), ("[]", "an object is expected, found list"), ("{", "not JSON")):
        config.write_text(text)
        with pytest.raises(ConversionError, match=f"config.json: {says}"):
            import_hf(folder, tmp_path / "out")
    config.write_text(good)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header in ([], {"a": 1}, {"a": {"dtype": ["F32"]}}, {"a": entry | {"shape": [3]}}, {"a": entry | {"data_offsets": [-8, 0]}},
                   {"a": entry | {"shape": None}}, {"a": entry | {"dtype": "F99"}}):  # fmt: skip
        text = json.dumps(header).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(SafetensorsError, match="model.safetensors: not a safetensors file"):
            import_hf(folder, tmp_path / "out")
    weights.write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(SafetensorsError, match="a header of 9223372036854775807 bytes in a file of 10"):
        import_hf(folder, tmp_path / "out")
    for text in ("", "[]", "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(SafetensorsError, match="index.json: not an index of safetensors files"):
            import_hf(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", [b"", b"abc", b"-5", b"\xff\xfe", "５".encode()])
def test_a_damaged_tracker_is_named(word, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(word)
    with pytest.raises(CheckpointError, match="latest_checkpointed_iteration.txt: an iteration or `release` is expected"):
        Checkpoint(tmp_path)


def test_nothing_is_overwritten_and_mistakes_exit_2(tmp_path, capsys):
    folder = make_folder(tmp_path / "hf", LLAMA)
    import_hf(folder, tmp_path / "ckpt")
    checkpoint = Checkpoint(tmp_path / "ckpt")
    with pytest.raises(ConversionError, match="not an empty folder"):
        export(checkpoint, folder)
    with pytest.raises(ConversionError, match="--vocab-size 1000: the embedding has 128 rows"):
        export(checkpoint, tmp_path / "new", vocab_size=1000)
    for argv, says in (
        (["export", str(tmp_path / "nowhere"), str(tmp_path / "new")], "no such folder"),
        (["export", str(folder), str(tmp_path / "new")], "not a distributed checkpoint"),
        (["import", str(tmp_path), str(tmp_path / "new")], "no config.json in it"),
    ):
        assert main(argv) == 2
        assert says in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_missing_tensor_or_layer_is_named(tmp_path):
    folder = make_folder(tmp_path / "hf", LLAMA)
    tensors = {n: Reader(folder).get(n) for n in Reader(folder) if "layers.1.mlp.up_proj" not in n}
    save(folder / "model.safetensors", tensors)
    with pytest.raises(SafetensorsError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        import_hf(folder, tmp_path / "ckpt")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SafetensorsError, match="not a safetensors file"):
        import_hf(folder, tmp_path / "ckpt")


def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch):
    """The arguments are unpickled as plain values; what else a file names is never called."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    from megatron_hybrid.convert import hf

    folder, state = make_folder(tmp_path / "hf", LLAMA), {}
    monkeypatch.setattr(hf, "write_checkpoint", lambda out, made: state.update(made))
    import_hf(folder, tmp_path / "unused")
    monkeypatch.undo()
    state["common_state/shard_0_1"][0]["args"].evil = Evil()
    hf.write_checkpoint(tmp_path / "ckpt", state)
    args = Checkpoint(tmp_path / "ckpt").args
    assert "evil" not in args and args["num_layers"] == 2 and not (tmp_path / "made").exists()


def test_a_damaged_checkpoint_says_so(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        Checkpoint(tmp_path)


def test_a_checkpoint_that_is_not_all_there_says_so(tmp_path, capsys):
    import_hf(make_folder(tmp_path / "hf", LLAMA), tmp_path / "ckpt")
    shards = list((tmp_path / "ckpt").rglob("*.distcp"))
    sizes = {path: path.stat().st_size for path in shards}
    for path, size in sizes.items():
        os.truncate(path, size - 1)
    with pytest.raises(CheckpointError, match="distcp is cut off: "):
        Checkpoint(tmp_path / "ckpt").load(["embedding.word_embeddings.weight"])
    for path in sizes:
        path.write_bytes(bytes(sizes[path]))  # as long as it was, and all zeros
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out")]) == 2
    assert "cannot be read: " in capsys.readouterr().err
