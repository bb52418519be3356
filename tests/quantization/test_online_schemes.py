"""vLLM's online names and `--quantization-config`: what becomes of which layer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.cli.inspect import inspect
from quire.cli.serve import build_parser
from quire.config import EngineConfig, ModelShape
from quire.config.cli import engine_config
from quire.config.online_schemes import SCHEMES, online_plan
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.coded import KINDS
from quire.models.inspection import weight_forms
from quire.models.registry import load_model
from quire.quantization import online, online_floats
from quire.weights.dummy import random_checkpoint

DEMO = EngineConfig().model.folder
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[E4M3.isfinite()].unique()
E2M1 = torch.tensor(KINDS["e2m1"].values).unique()


def weight(n=140, k=160, seed=0):
    found = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    found[3, 32:64] = 0
    found[7] *= 100
    return found.bfloat16()


def nearest(values, table):
    """The nearest numbers of a table, all distances looked at; halfway: either."""
    return (values[..., None] - table).abs().min(-1).values


def scale_of(w, group_rows, group, most):
    """`most(max |w|)` of every block, spread over its elements."""
    out = torch.empty_like(w)
    for r in range(0, w.shape[0], group_rows):
        for c in range(0, w.shape[1], group):
            block = w[r : r + group_rows, c : c + group]
            out[r : r + group_rows, c : c + group] = most(block.abs().max())
    return out


def power(emax):
    return lambda m: 2.0 ** (torch.floor(torch.log2(m)) - emax) if m > 0 else torch.tensor(0.0)


CASES = {
    "fp8_per_tensor": (10**6, 10**6, lambda m: m / 448, E4M3),
    "fp8_per_channel": (1, 10**6, lambda m: m / 448, E4M3),
    "fp8_per_block": (128, 128, lambda m: m / 448, E4M3),
    "mxfp8": (1, 32, power(8), E4M3),
    "mxfp4": (1, 32, power(2), E2M1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1 << 22, 160 * 30])
def test_weights_are_the_nearest_of_the_format(name, rows, monkeypatch):
    monkeypatch.setattr(online_floats, "_ELEMENTS", rows)
    w, (group_rows, group, most, table) = weight().float(), CASES[name]
    coded = online._MAKERS[name](w.bfloat16())
    scale = scale_of(w, group_rows, group, most)
    spread = coded.scales.repeat_interleave(coded.group, 1)[:, : w.shape[1]]
    assert torch.allclose(spread, scale, rtol=1e-6, atol=0)
    safe = scale.masked_fill(scale == 0, 1)
    given = coded.dequantise() / safe
    wanted = (w / safe).clamp(-table.max(), table.max())
    assert torch.allclose((given - wanted).abs(), nearest(wanted, table), rtol=1e-4, atol=5e-4)
    assert bool((coded.dequantise()[3, 32:64] == 0).all())


def test_nvfp4_has_scales_that_e4m3_holds():
    w = weight().float()
    coded = online_floats.nvfp4(w.bfloat16())
    whole = w.abs().max() / (448 * 6)
    small = (coded.scales / whole).flatten()
    assert torch.allclose(nearest(small, E4M3), torch.zeros(()), atol=1e-4)
    groups = w.view(140, 10, 16).abs().amax(2)
    assert torch.allclose(coded.scales, groups / 6, rtol=0.07, atol=float(whole) / 400)
    values = coded.values()
    wanted = w / coded.scales.repeat_interleave(16, 1).clamp_min(1e-20)
    away = (values - wanted.clamp(-6, 6)).abs()
    assert torch.allclose(away, nearest(wanted.clamp(-6, 6), E2M1), atol=1e-3)


def test_e2m1_halfway_goes_to_the_even_code():
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 9.0, -9.0, 0.0])
    table = torch.tensor(KINDS["e2m1"].values)
    got = table[online_floats.nearest_e2m1(halfway).long()]
    assert got.tolist() == [0, 1, 1, 2, 2, 4, 4, 0, -4, 6, -6, 0]


def test_e2m1_is_the_nearest_of_every_number():
    """Of all that bf16 has, and of float32's neighbours of what is halfway."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = [torch.nextafter(halfway, to * halfway) for to in (0, 2)]
    numbers = torch.cat([every[every.isfinite()], *beside, *(-x for x in beside)])
    sizes = torch.tensor(KINDS["e2m1"].values[:8], dtype=torch.float64)
    away = (numbers.double().abs().clamp(max=100).unsqueeze(1) - sizes).abs()
    first, last = away.argmin(1), 7 - away.flip(1).argmin(1)
    wanted = torch.where(first % 2 == 0, first, last) + 8 * (numbers < 0)
    assert torch.equal(online_floats.nearest_e2m1(numbers).long(), wanted)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", sorted(online._MAKERS))
def test_numbers_that_are_not_finite_are_refused(name, number):
    weight = torch.ones(70, 64)
    weight[69, 33] = number
    with pytest.raises(ModelLoadError, match="finite"):
        online._MAKERS[name](weight)


@pytest.mark.parametrize("name", [*CASES, "int8", "int4"])
def test_a_layer_of_zeros(name):
    plan = online_plan(name, {})
    coded = online.int4(torch.zeros(4, 64), 32) if name == "int4" else None
    coded = coded or online._MAKERS[plan.linear.scheme](torch.zeros(4, 64))
    assert not coded.dequantise().any()


# ---- which layers --------------------------------------------------------------------------------


def forms(quantization=None, config=None, folder=DEMO, **how):
    plan, shape = online_plan(quantization, config or {}), ModelShape.from_folder(folder)
    model = load_model(shape, folder, "auto", "cpu", quantization=plan, **how)
    return {name: form.layers for name, form in weight_forms(model).items()}


FP8 = "fp8 (e4m3), one scale for each row, products in bfloat16"


@pytest.mark.parametrize(
    ("quantization", "config", "want"),
    [
        ("int8", None, {"int8": 21}),
        ("fp8_per_channel", None, {FP8: 20, "bfloat16": 1}),
        (None, {"linear": "int8"}, {"int8": 21}),
        ("online", {"linear": {"weight": "fp8_per_channel_static", "activation": None}},
         {FP8: 20, "bfloat16": 1}),
        ("int4", {"group_size": 128}, {"int8": 1, "int4 in groups of 128": 10,
         "int4 in groups of 64": 5, "int4 in groups of 32": 5}),
        ("int4", {"group_size": 64, "targets": {"re:.*down_proj": {"scheme": "int4",
         "group_size": 32}}}, {"int8": 1, "int4 in groups of 64": 10, "int4 in groups of 32": 10}),
        ("int8", {"ignore": ["lm_head", "re:.*layers.0."]}, {"bfloat16": 5, "int8": 16}),
        ("int8", {"ignore": [f"model.layers.1.self_attn.{p}_proj" for p in "qkv"]},
         {"bfloat16": 1, "int8": 20}),
        ("int8", {"ignore": ["model.layers.1.self_attn.qkv_proj"]}, {"bfloat16": 1, "int8": 20}),
        ("int4", {"targets": {"lm_head": "int4", "re:.*o_proj": None}},
         {"int4 in groups of 32": 16, "bfloat16": 5}),
        (None, {"targets": {"re:.*gate_up": "mxfp4"}},
         {"bfloat16": 16, "mxfp4, products in bfloat16": 5}),
        (None, {"global_scheme": "int8", "linear_scheme_override": "int4"},
         {"int4 in groups of 32": 20, "int8": 1}),
    ],
)  # fmt: skip
def test_each_layer_gets_its_scheme(quantization, config, want):
    assert forms(quantization, config) == want


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("mixture"), {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64,
        "intermediate_size": 64, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    })  # fmt: skip


EIGHT = "int8, one scale for each row, products in bfloat16"


@pytest.mark.parametrize(
    ("quantization", "config", "experts"),
    [
        ("experts_int8", None, EIGHT),
        ("int8_per_channel_weight_only", None, EIGHT),
        ("nvfp4_per_token", None, "nvfp4, products in bfloat16"),
        ("mxfp4", {"linear": {"weight": None}}, "mxfp4, products in bfloat16"),
        (None, {"moe": "int4"}, "int4 in groups of 32"),
    ],
)
def test_experts_alone(quantization, config, experts, mixture):
    layers = ModelShape.from_folder(mixture).num_layers
    found = forms(quantization, config, mixture, load_format="dummy")
    assert found.pop(experts) == 8 * layers
    assert set(found) == {"bfloat16"}


@pytest.mark.parametrize("name", [n for n in SCHEMES if not SCHEMES[n].experts_only])
def test_text_is_sensible(name):
    with LLM(quantization=name, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris")


@pytest.mark.parametrize("name", ["fp8_per_block", "mxfp8", "mxfp4"])
def test_the_product_is_that_of_the_rounded_weights(name, tmp_path):
    """A checkpoint with the weights that the codes stand for computes the same; the same bits
    unless the codes are 8-bit floats, whose scales belong to sums."""
    tensors = load_file(DEMO / "model.safetensors")
    for tensor in [n for n in tensors if n.endswith("proj.weight")]:
        tensors[tensor] = online._MAKERS[name](tensors[tensor]).dequantise().bfloat16()
    for path in DEMO.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3)
    found = []
    for given, how in ((str(DEMO), {"quantization": name}), (str(tmp_path), {})):
        with LLM(given, **how, max_model_len=128) as llm:
            (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
            found.append([{t: e.logprob for t, e in p.items()} for p in output.outputs[0].logprobs])
    if name == "mxfp4":
        assert found[0] == found[1]
    for one, other in zip(*found, strict=True):  # the likeliest; others may be different ones
        assert next(iter(one)) == next(iter(other))
        assert max(one.values()) == pytest.approx(max(other.values()), abs=0.05)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "config", "told"),
    [
        ("int3", {}, "got 'int3'; nearest: int4"),
        ("bitsandbytes", {}, "nearest: int4"),
        ("fp8_per_chanel", {}, "did you mean 'fp8_per_channel'?"),
        ("online", {}, "--quantization online names no scheme"),
        (None, {"ignore": ["lm_head"]}, "--quantization-config names no scheme"),
        (None, {"linear": "nvfp4_per_token"}, "is for experts of a mixture"),
        (None, {"linear": {"weight": "int8", "activation": "fp8_per_token"}}, "cannot be chosen"),
        ("int4", {"group_size": 48}, "must be 32, 64, 128, got 48; nearest: 32"),
        ("int4", {"group_size": "64"}, "got '64'"),
        ("int8", {"ignored": []}, "unknown key 'ignored'; did you mean 'ignore'?"),
        ("int8", {"ignore": "lm_head"}, "ignore must be a list of names"),
        ("int8", {"ignore": ["re:("]}, "is no regular expression"),
        ("int8", {"targets": ["Linear"]}, "targets must be an object"),
        ("int8", {"targets": {"lm_head": "int5"}}, "targets: lm_head must be one of"),
        ("int8", {"linear": {"bits": 4}}, "unknown key 'bits'"),
    ],
)
def test_what_is_refused(quantization, config, told):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(quantization=quantization, quantization_config=config).model \
            .online_plan(ModelShape.from_folder(DEMO))  # fmt: skip
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"ignore": ["model.layers.0.self_attn.q_proj"]}, "name all of them"),
        ({"ignore": ["model.layers.0.mlp.down_prj"]}, "mlp.down_proj"),
        ({"ignore": ["re:.*"]}, "all are left out"),
    ],
)
def test_names_that_fit_no_layer(config, told):
    with pytest.raises(ConfigError) as caught:
        forms("int8", config)
    assert told in caught.value.message


def test_experts_of_a_model_that_has_none():
    with pytest.raises(ConfigError, match="it has no experts"):
        forms("nvfp4_per_token")


def test_a_quantised_checkpoint_takes_no_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((DEMO / "config.json").read_text())
                   | {"quantization_config": {"quant_method": "awq"}})
    )  # fmt: skip
    given = EngineConfig.from_options(model=str(DEMO), quantization_config={"linear": "int8"})
    with pytest.raises(ConfigError, match=r"is quantised already \(awq\); leave it out"):
        given.model.online_plan(ModelShape.from_folder(tmp_path))


# ---- doors ---------------------------------------------------------------------------------------

SAID = {"ignore": ["lm_head"], "linear": "int8"}


def by_flags(*words):
    return engine_config(build_parser().parse(words)).model.quantization_config


def test_every_door(tmp_path):
    text, path = json.dumps(SAID), tmp_path / "how.json"
    path.write_text(text)
    (tmp_path / "nested.yaml").write_text(
        "quantization-config:\n  ignore: [lm_head]\n  linear: int8\n"
    )
    (tmp_path / "path.yaml").write_text(f"quantization-config: '@{path}'\n")
    found = [
        by_flags("--quantization-config", text),
        by_flags("--quantization-config", f"@{path}"),
        by_flags("--quantization-config", str(path)),
        by_flags("--quantization-config.linear", "int8", "--quantization-config.ignore",
                 '["lm_head"]'),
        by_flags("--config", str(tmp_path / "nested.yaml")),
        by_flags("--config", str(tmp_path / "path.yaml")),
        EngineConfig.from_options(quantization_config=SAID).model.quantization_config,
        EngineConfig.from_options(quantization_config=f"@{path}").model.quantization_config,
    ]  # fmt: skip
    assert found == [SAID] * len(found)


@pytest.mark.parametrize(
    ("given", "told"),
    [("@none.json", "cannot read 'none.json'"), ("{x", "not JSON"), ("[1]", "cannot read '[1]'"),
     ("@", "cannot read")],
)  # fmt: skip
def test_bad_files(given, told):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(quantization_config=given)
    assert told in caught.value.message


def test_inspect_tells(tmp_path):
    config = EngineConfig.from_options(quantization="int4", quantization_config={
        "targets": {"re:.*down_proj": "fp8_per_block"}})  # fmt: skip
    schemes = inspect(config)["weights"]["schemes"]
    fp8 = schemes["fp8 (e4m3) in blocks of 128 x 128, products in bfloat16"]
    assert fp8["layers"] == 5 and fp8["activations"] == "float"
    assert 8 < fp8["bits_per_weight"] < 8.01 and schemes["int8"]["layers"] == 1


@pytest.mark.parametrize("name", [n for n in SCHEMES if not SCHEMES[n].experts_only])
def test_memory_is_estimated_before_anything_is_read(name, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 1000}
    folder = random_checkpoint(tmp_path, {**sizes, "torch_dtype": "bfloat16"})
    shape = ModelShape.from_folder(folder)
    model = load_model(shape, folder, "auto", "cpu", quantization=name)
    taken = sum(form.nbytes for form in weight_forms(model).values())
    given = EngineConfig.from_options(model=str(folder), quantization=name).model
    assert 0.93 < given.weight_bytes(shape, model.num_parameters, 2) / taken < 1.1
