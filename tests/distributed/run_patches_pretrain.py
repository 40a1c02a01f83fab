"""Worker: Megatron's own ``pretrain()`` on mock data, on CPU and gloo, for several parallel layouts.

    torchrun ... run_patches_pretrain.py FOLDER first|resume CASE...

``first`` trains each case for all iterations and saves a checkpoint half-way; ``resume`` is a new process
that loads it and trains the rest. Each writes the exact gradient norms and validation losses, as
``float.hex``, to FOLDER/CASE.first.json and FOLDER/CASE.resume.json; the launcher compares them.
"""

import functools
import json
import sys
import traceback
from pathlib import Path

from megatron_hybrid.patches import cpu_device

cpu_device.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron_hybrid import patches  # noqa: E402

with patches.quiet_missing_te_warnings():
    import megatron.training.training as training
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.training import get_args, get_tokenizer
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

ITERATIONS, HALF = 6, 3
COMMON = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --split 99,1,0 --num-workers 0 --lr 1e-3
    --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 100
    --eval-iters 1 --ckpt-format torch_dist --transformer-impl local --position-embedding-type rope
    --no-rope-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    --disable-bias-linear --untie-embeddings-and-output-weights --seed 1234
""".split()
BF16 = ["--bf16", "--accumulate-allreduce-grads-in-fp32"]
MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss
""".split()
TP2 = ["--tensor-model-parallel-size", "2"]
NEVER_CLIPS = ["--clip-grad", "1000"]  # the norm, whose order of sums follows the shards, decides nothing
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
CASES = {
    "tp2": [*TP2, *BF16],
    "tp2_fp32": [*TP2, *NO_DROPOUT],
    "tp2_sp_fp32": [*TP2, *NO_DROPOUT, "--sequence-parallel", "--use-distributed-optimizer"],
    "tp2_sp": [*TP2, "--sequence-parallel", "--use-distributed-optimizer", *BF16],
    "dp2": ["--use-distributed-optimizer", *NEVER_CLIPS, *BF16],
    "dp2_overlap": [
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
        "--dist-ckpt-optim-fully-reshardable", *NEVER_CLIPS, *BF16,
    ],
    "dp2_plain_optimizer": [*NEVER_CLIPS, *BF16],
    "pp2": ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", *BF16],
    "ep2": ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", *MOE, *BF16],
    # for 4 ranks
    "tp2_sp_dp2_overlap": [
        *TP2, "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--overlap-param-gather", *BF16,
    ],
    "tp2_sp_pp2_interleaved": [
        *TP2, "--sequence-parallel", "--pipeline-model-parallel-size", "2", "--num-layers", "4",
        "--num-layers-per-virtual-pipeline-stage", "1", "--use-distributed-optimizer", *BF16,
    ],
    "tp2_ep2_allgather": [
        *TP2, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "2", "--sequence-parallel",
        "--use-distributed-optimizer", *MOE, "--moe-token-dispatcher-type", "allgather", *BF16,
    ],
}  # fmt: skip


def datasets(num_samples, vp_stage=None):
    """Megatron's mock GPT data."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split=args.split,
        num_dataset_builder_threads=1,
        path_to_cache=None,
        mmap_bin_files=True,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


datasets.is_distributed = True


class Norm(torch.nn.LayerNorm):
    """A norm that may run under sequence parallelism, which Megatron's own wrapper of torch's may not."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def sequence_parallel_spec(config, vp_stage=None):
    """Megatron's local layers with the norms exchanged."""
    layer = get_gpt_layer_local_spec(num_experts=config.transformer.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    count = get_num_layers_to_build(config.transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def loss_function(loss_mask, output):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.float().view(-1) * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    """One microbatch: every rank builds the same mock batch itself."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, functools.partial(loss_function, batch["loss_mask"])


def record(results):
    """Let Megatron's training functions leave their exact numbers in ``results``."""
    originals = training.train_step, training.evaluate

    def train_step(*args, **kwargs):
        returned = originals[0](*args, **kwargs)
        results["grad_norm"].append(float(returned[5]).hex())
        return returned

    def evaluate(*args, **kwargs):
        returned = originals[1](*args, **kwargs)
        results["validation"] += [float(value).hex() for value in (returned[0] or {}).values()]
        return returned

    training.train_step, training.evaluate = train_step, evaluate
    return originals


def run_case(case, mode, folder):
    """One call of pretrain(), its numbers to a file."""
    checkpoint = folder / f"{case}.checkpoint"
    arguments = ["--distributed-backend", "nccl", "--train-iters", str(ITERATIONS)]
    if mode == "first":
        arguments += ["--save", checkpoint, "--save-interval", HALF]
    else:
        arguments += ["--load", checkpoint, "--ckpt-step", HALF]
    print(f"CASE {case} {mode}", flush=True)
    sys.argv = [__file__, *COMMON, *CASES[case], *map(str, arguments)]
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    if args.sequence_parallel:
        model.transformer_layer_spec = sequence_parallel_spec
    config = pretrain_cfg_container_from_args(args, model)
    results = {"grad_norm": [], "validation": []}
    originals = record(results)
    try:
        training.pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    finally:
        training.train_step, training.evaluate = originals
    if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
        if mpu.get_data_parallel_rank() == 0:
            (folder / f"{case}.{mode}.json").write_text(json.dumps(results))
    dist.barrier()
    training.destroy_global_state()


def main():
    folder, mode, *cases = sys.argv[1:]
    print(*patches.apply_all(), sep="\n")
    dist.init_process_group("nccl")
    for case in cases:
        run_case(case, mode, Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except SystemExit:
        traceback.print_exc()
        raise
