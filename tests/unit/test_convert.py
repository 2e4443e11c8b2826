"""FP8 layers for whole models, by name."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch
from torch import nn

from fp8console.numerics.convert import NothingMatches, convert
from fp8console.numerics.counts import cast_counts
from fp8console.numerics.fp8_linear import FNUZ, GRADIENT_ONLY, Fp8Conv2d, Fp8Layer, Fp8Linear
from fp8console.numerics.torchao_layers import NoTorchao, convert_with_torchao


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def model() -> nn.Sequential:
    features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten())
    shared = nn.Linear(16, 16, bias=False)
    layers = [("features", features), ("down", nn.Linear(64, 16)), ("once", shared), ("own", Own(16, 16))]
    layers += [("twice", shared), ("head", nn.Linear(16, 2))]
    whole = nn.Sequential()
    for name, layer in layers:
        whole.add_module(name, layer)
    return whole


def test_everything_of_the_known_kinds_is_converted() -> None:
    net = model()
    assert convert(net) == ["features.0", "down", "once", "head"]
    assert type(net.features[0]) is Fp8Conv2d and type(net.down) is type(net.head) is Fp8Linear
    assert type(net.own) is Own
    net(torch.randn(3, 1, 4, 4)).sum().backward()
    assert [count.name for count in cast_counts(net)] == ["features.0", "down", "once", "head"]
    assert all(count.values is not None and count.values[1] > 0 for count in cast_counts(net))
    # Used twice, so it has cast two gradients of 3 x 16.
    assert net.once.grad_counts.values[1] == 96
    pickle.loads(pickle.dumps(net))(torch.randn(3, 1, 4, 4))


def test_modules_parameters_hooks_and_optimizers_stay() -> None:
    net = model()
    before = dict(net.named_modules(remove_duplicate=False)), dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    net.down.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    net.eval()
    convert(net)
    assert all(module is before[0][name] for name, module in net.named_modules(remove_duplicate=False))
    assert all(parameter is before[1][name] for name, parameter in net.named_parameters())
    assert net.twice is net.once and not net.down.training
    weight = net.down.weight.detach().clone()
    net(torch.randn(3, 1, 4, 4)).sum().backward()
    optimizer.step()
    assert seen == [(3, 16)] and not torch.equal(net.down.weight, weight)


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["down", "head"], [], ["down", "head"]),
        (["features.*"], [], ["features.0"]),
        (["*"], ["features.*", "head"], ["down", "once"]),
        (["[do]*"], ["once"], ["down"]),
    ],
)
def test_patterns(include: list[str], exclude: list[str], names: list[str]) -> None:
    net = model()
    assert convert(net, include, exclude) == names
    assert [name for name, module in net.named_modules() if isinstance(module, Fp8Layer)] == names


@pytest.mark.parametrize(("include", "exclude"), [(["down", "heads"], []), (["*"], ["heads"]), (["*", "heads"], [])])
def test_a_pattern_that_matches_nothing_changes_nothing(include: list[str], exclude: list[str]) -> None:
    net = model()
    with pytest.raises(
        NothingMatches, match=r"^no layer's name matches 'heads'; there are: features\.0, down, once, head$"
    ):
        convert(net, include, exclude)
    assert not any(isinstance(module, Fp8Layer) for module in net.modules())


def test_what_has_no_layers_or_very_many_is_said_in_one_line() -> None:
    with pytest.raises(NothingMatches, match=r"there are: none that could be converted$"):
        convert(nn.Sequential(nn.ReLU()))
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    with pytest.raises(NothingMatches, match=r"38, 39, \.\.\. \(50 in all\)$"):
        convert(many, ["x"])
    with pytest.raises(TypeError, match=r"patterns come in a list: \['head'\]"):
        convert(model(), "head")


def test_a_lone_layer_is_converted_too() -> None:
    layer = nn.Linear(2, 2)
    assert convert(layer) == [""] and type(layer) is Fp8Linear


def test_converting_again_takes_up_a_new_recipe_only() -> None:
    net = model()
    convert(net)
    counts = net.head.grad_counts
    assert convert(net) == [] and net.head.grad_counts is counts
    assert convert(net, ["head"], recipe=FNUZ) == ["head"]
    assert net.head.grad_counts.fmt.name == "e5m2fnuz" and net.down.grad_counts.fmt.name == "e5m2"


def test_casting_gradients_alone_leaves_the_outputs() -> None:
    torch.manual_seed(0)
    net = model().double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    before = net(x)
    convert(net, recipe=GRADIENT_ONLY)
    torch.testing.assert_close(net(x), before)


def test_attention_keeps_its_own_projection() -> None:
    """It never calls that layer, it reads its weight: converting it would do nothing."""
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(NothingMatches):
        convert(attention)


def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend is one of fp8console, torchao, not 'te'"):
        convert(model(), backend="te")
    with pytest.raises(ValueError, match="takes no recipe"):
        convert(model(), recipe=FNUZ, backend="torchao")


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        NoTorchao, match=r"^torchao's FP8 layers can't be loaded \(.*\): pip install 'fp8console\[torchao\]'$"
    ):
        convert(model(), backend="torchao")


class TestTorchao:
    """Real torchao, emulating where there is no FP8 hardware."""

    @pytest.fixture(autouse=True)
    def needs_torchao(self) -> None:
        pytest.importorskip("torchao.float8", reason="needs torchao")

    def test_linear_layers_become_torchaos(self) -> None:
        net = model().eval()
        weight = net.down.weight
        names = convert(net, exclude=["head"], backend="torchao")
        assert names == ["down", "once", "twice"]
        assert type(net.down).__name__ == type(net.twice).__name__ == "Float8Linear"
        assert type(net.head) is nn.Linear and type(net.own) is Own and type(net.features[0]) is nn.Conv2d
        assert net.down.weight is weight and net.once.weight is net.twice.weight and not net.down.training
        if not torch.cuda.is_available():
            assert net.down.config.emulate
        net(torch.randn(16, 1, 4, 4)).sum().backward()
        assert net.down.weight.grad is not None
        assert convert(net, exclude=["head"], backend="torchao") == []

    def test_its_numbers_are_those_of_our_layers_with_dynamic_scaling(self) -> None:
        from fp8console.numerics.fp8_linear import Fp8Recipe

        torch.manual_seed(0)
        theirs, ours = (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)) for _ in range(2))
        ours.load_state_dict(theirs.state_dict())
        convert_with_torchao(theirs, emulate=True)
        recipe = Fp8Recipe(backward_format="e5m2", forward_scaling="dynamic", backward_scaling="dynamic")
        convert(ours, recipe=recipe)
        x = torch.randn(16, 64)
        results = []
        for net in (theirs, ours):
            output = net(x)
            output.square().sum().backward()
            results.append((output.detach(), net[0].weight.grad, net[1].weight.grad))
        for their, our in zip(*results):
            assert (their - our).norm() < 1e-4 * our.norm()

    def test_odd_shapes_and_root_layers_are_refused(self) -> None:
        with pytest.raises(ValueError, match="sides that are no multiple of 16: exclude head, or emulate"):
            convert_with_torchao(model(), emulate=False)
        with pytest.raises(ValueError, match=r"put it into nn\.Sequential"):
            convert_with_torchao(nn.Linear(16, 16))
        with pytest.raises(NothingMatches):
            convert_with_torchao(model(), ["heads"])
