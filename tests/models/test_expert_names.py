"""Checkpoints that keep parameters merged, stacked or in other layouts; and what is refused."""

import torch

from quire.errors import ModelLoadError
from quire.layers.parameter import Parameter
from quire.weights.files import write_safetensors
from quire.weights.loader import load_weights
from quire.weights.names import (
    GATE_UP,
    NameRules,
    Stack,
    transposed,
    transposed_uninterleaved,
)

PLAIN = NameRules(
    merges=(GATE_UP,),
    substitutions=((r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj.")),
    stacks=(Stack("experts.gate_up_proj", "experts.{}.gate_up_proj.weight"),),
)
COLUMNS = NameRules(
    merges=(GATE_UP,),
    stacks=(
        Stack("experts.gate_up_proj", "experts.{}.gate_up_proj.weight", transposed_uninterleaved),
        Stack("experts.down_proj", "experts.{}.down_proj.weight", transposed),
    ),
)


def load(folder, tensors, rules, shapes, dtype=torch.float32):
    """Loaded tensors by our names. `shapes`: name to (shape, parts) or (shape, parts, dtype)."""
    write_safetensors(
        {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()},
        folder / "model.safetensors",
    )
    found = {}

    def target(name, shape, parts=(), own=None):
        return Parameter(shape, lambda tensor: found.update({name: tensor.clone()}), parts, own)

    targets = {name: target(name, *rest) for name, rest in shapes.items()}
    count = load_weights(folder, targets, rules, dtype, "cpu")
    return found, count


def refused(*arguments):
    try:
        load(*arguments)
    except ModelLoadError as error:
        return str(error)
    raise AssertionError("nothing was refused")


EXPERTS = {f"m.experts.{i}.gate_up_proj.weight": ((6, 4), (3, 3)) for i in range(2)}


def test_parts_whole_and_stack_give_the_same(tmp_path):
    whole = torch.randn(2, 6, 4)
    parts = {
        f"m.experts.{i}.{name}.weight": whole[i, rows]
        for i in range(2)
        for name, rows in (("w1", slice(0, 3)), ("w3", slice(3, 6)))
    }
    merged = {f"m.experts.{i}.gate_up_proj.weight": whole[i] for i in range(2)}
    stacked = {"m.experts.gate_up_proj": whole}
    for tensors in (parts, merged, stacked):
        found, count = load(tmp_path, tensors, PLAIN, EXPERTS)
        assert count == 48
        assert torch.equal(torch.stack([found[name] for name in EXPERTS]), whole)


def test_columns_in_turns(tmp_path):
    gate, up, down = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    tensors = {
        "m.experts.gate_up_proj": torch.stack((gate, up), 2).flatten(1, 2).transpose(1, 2),
        "m.experts.down_proj": down.transpose(1, 2),
    }
    shapes = EXPERTS | {f"m.experts.{i}.down_proj.weight": ((4, 3),) for i in range(2)}
    found, _ = load(tmp_path, tensors, COLUMNS, shapes)
    for i in range(2):
        want = torch.cat((gate[i], up[i]))
        assert torch.equal(found[f"m.experts.{i}.gate_up_proj.weight"], want)
        assert torch.equal(found[f"m.experts.{i}.down_proj.weight"], down[i])


def test_a_parameter_keeps_its_own_type(tmp_path):
    value = torch.tensor([1.0009765625, 2.0])
    shapes = {"m.bias": ((2,), (), torch.float32), "m.weight": ((2,),)}
    found, _ = load(tmp_path, {"m.bias": value, "m.weight": value}, PLAIN, shapes, torch.bfloat16)
    assert torch.equal(found["m.bias"], value)
    assert found["m.weight"].dtype == torch.bfloat16


def test_a_short_stack_is_missing_experts(tmp_path):
    message = refused(tmp_path, {"m.experts.gate_up_proj": torch.ones(1, 6, 4)}, PLAIN, EXPERTS)
    assert "missing: m.experts.1.gate_proj.weight, m.experts.1.up_proj.weight" in message


def test_a_long_or_misshaped_stack_is_named(tmp_path):
    message = refused(tmp_path, {"m.experts.gate_up_proj": torch.ones(3, 6, 4)}, PLAIN, EXPERTS)
    assert "unexpected: m.experts.gate_up_proj" in message
    message = refused(tmp_path, {"m.experts.gate_up_proj": torch.ones(2, 6, 5)}, PLAIN, EXPERTS)
    assert "m.experts.gate_up_proj (expected [6, 4], found [6, 5] in model.safetensors)" in message
    message = refused(tmp_path, {"m.experts.gate_up_proj": torch.ones(2, 6)}, PLAIN, EXPERTS)
    assert "unexpected: m.experts.gate_up_proj" in message


def test_parts_beside_the_whole_are_unexpected(tmp_path):
    tensors = {
        "m.experts.gate_up_proj": torch.ones(2, 6, 4),
        "m.experts.0.w1.weight": torch.ones(3, 4),
    }
    message = refused(tmp_path, tensors, PLAIN, EXPERTS)
    assert "unexpected: m.experts" in message
