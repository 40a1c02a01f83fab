"""Roles: what they hold, what they refuse, and the 32 bits that name a tensor for stochastic rounding."""

import dataclasses
import subprocess
import sys
import zlib

import pytest

from megatron_hybrid.roles import MODULE_TYPES, TENSOR_TYPES, ModuleRole, QuantizerRole, tensor_id

FC1 = "decoder.layers.3.mlp.linear_fc1"


def test_a_module_emits_its_operands_in_order():
    module = ModuleRole("grouped_linear", FC1, layer=4, num_layers=8, expert=5)
    assert module.operands() == tuple(
        QuantizerRole("grouped_linear", t, FC1, 4, 5) for t in ("input", "weight", "grad_output")
    )
    attention = ModuleRole("dpa", "decoder.layers.3.self_attention.core_attention", layer=4)
    assert [role.tensor_type for role in attention.operands()] == ["qkv", "s", "o", "do", "dp"]


@pytest.mark.parametrize("role", [QuantizerRole("linear", "input", "fc"), ModuleRole("linear", "fc")])
def test_roles_are_frozen_and_hashable(role):
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.name = "other"
    assert hash(role) == hash(dataclasses.replace(role))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ModuleRole("liner", "fc"), ["'fc'", "'liner'", "did you mean 'linear'"]),
        (lambda: ModuleRole("linear", "fc", layer=0), ["numbered globally from 1", "0"]),
        (lambda: ModuleRole("linear", "fc", layer=9, num_layers=8), ["layer 9", "8 layers"]),
        (lambda: ModuleRole("grouped_linear", "fc", expert=-1), ["experts", "-1"]),
        (lambda: QuantizerRole("linear", "wieght", "fc"), ["'wieght'", "did you mean 'weight'"]),
        (lambda: QuantizerRole("linear", "qkv", "fc"), ["no tensor 'qkv'"]),
        (lambda: ModuleRole("dpa", "attn").operand("weight"), ["a dpa has no tensor 'weight'"]),
    ],
)
def test_refusals_say_what_is_right(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_tensor_id_is_the_crc_of_name_and_tensor_type():
    role = QuantizerRole("linear", "grad_output", FC1, layer=4)
    assert tensor_id(role) == zlib.crc32(b"decoder.layers.3.mlp.linear_fc1|grad_output") == 0x88D605EF
    assert tensor_id(dataclasses.replace(role, layer=None, module_type="grouped_linear", expert=3)) == tensor_id(role)


def test_tensor_ids_of_a_model_differ():
    roles = [
        QuantizerRole(kind, t, f"decoder.layers.{i}.{part}")
        for i in range(96)
        for part, kind in (("mlp.linear_fc1", "linear"), ("mlp.linear_fc2", "linear"), ("core_attention", "dpa"))
        for t in TENSOR_TYPES[kind]
    ]
    ids = {tensor_id(role) for role in roles}
    assert len(ids) == len(roles) and all(0 <= i < 2**32 for i in ids)
    assert set(MODULE_TYPES) == set(TENSOR_TYPES)


def test_tensor_id_does_not_depend_on_the_process():
    code = f"from megatron_hybrid.roles import *; print(tensor_id(QuantizerRole('linear', 'weight', {FC1!r})))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert {int(r.stdout) for r in runs} == {tensor_id(QuantizerRole("linear", "weight", FC1))}
