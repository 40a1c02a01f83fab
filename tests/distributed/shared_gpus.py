"""More ranks than GPUs: checks over NCCL where there is one GPU.

NCCL refuses two ranks of a machine on one GPU. Told that each rank is a machine of its own it takes them, and they talk
over sockets in place of NVLink: the same collectives, streams and results, at no useful speed.
"""

from __future__ import annotations

import os


def take_device(backend: str):
    """This rank's device, before its process group starts: the CPU with gloo, else a GPU, now torch's current one."""
    import torch

    if backend == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", take_gpu(int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def take_gpu(ranks: int, gpus: int) -> int:
    """The GPU of this rank of torchrun, one of `gpus` for the `ranks` of this machine; before NCCL starts.

    Leaves it in LOCAL_RANK too, where Megatron reads it.
    """
    gpu = int(os.environ["LOCAL_RANK"])
    if ranks > gpus:
        os.environ |= {"NCCL_HOSTID": f"rank {os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
        gpu %= gpus
        os.environ["LOCAL_RANK"] = str(gpu)
    return gpu
