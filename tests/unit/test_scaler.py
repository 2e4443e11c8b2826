"""Fp8GradScaler where torch.amp.GradScaler is used: measuring, stepping, saving, and what it must leave alone."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8console.numerics import scaling_rules
from fp8console.numerics.fp8_linear import Fp8Linear, Fp8Recipe
from fp8console.numerics.scaler import Fp8GradScaler
from fp8console.numerics.scaling_rules import SettingRefused


def plain_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def counting_model(fmt: str = "e5m2", saturate: bool | None = None, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    recipe = Fp8Recipe(forward_format=None, backward_format=fmt, backward_saturate=saturate)
    return nn.Sequential(Fp8Linear(8, 16, recipe=recipe), nn.ReLU(), Fp8Linear(16, 1, recipe=recipe))


def batch(seed: int = 1, rows: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


def loss_of(net: nn.Module, seed: int = 1) -> Tensor:
    x, y = batch(seed)
    return nn.functional.mse_loss(net(x), y)


def train(scaler: Any, net: nn.Module, optimizer: Any, steps: int, bad: tuple[int, ...] = ()) -> list[float]:
    """The scales after each step; the gradients of ``bad`` steps hold an inf."""
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step)).backward()
        if step in bad:
            next(iter(net.parameters())).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.01, **options)


# -- like torch's --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"growth_interval": 3}, {"growth_interval": 1, "init_scale": 8.0}])
def test_preset_pytorch_trains_as_torchs_own(options: dict[str, Any]) -> None:
    ours, stock = Fp8GradScaler("cpu", "pytorch", **options), torch.amp.GradScaler("cpu", **options)
    bad = (0, 1, 7, 8, 20)
    nets = [plain_model(), plain_model()]
    found = [train(scaler, net, sgd(net), 30, bad) for scaler, net in zip((ours, stock), nets)]
    assert found[0] == found[1] and ours._get_growth_tracker() == stock._get_growth_tracker()
    assert all(torch.equal(*pair) for pair in zip(nets[0].parameters(), nets[1].parameters()))


@pytest.mark.parametrize(
    "new", [64.0, 64, torch.tensor(64.0), torch.tensor([64.0]), torch.tensor(64), torch.tensor([[64.0]]).double()]
)
def test_update_takes_a_new_scale_as_torchs_does(new: Any) -> None:
    scaler = Fp8GradScaler("cpu", "pytorch")
    net = plain_model()
    train(scaler, net, sgd(net), 3)
    scaler.update(new)
    assert scaler.get_scale() == 64.0 and scaler._get_growth_tracker() == 3  # torch keeps the count too
    if isinstance(new, Tensor):
        new.fill_(1)
        assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("new", [0, 0.0, -1.0, math.nan, math.inf, 2.0**127, True, "8"])
def test_update_refuses_a_number_that_is_no_scale(new: Any) -> None:
    scaler = Fp8GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(SettingRefused, match=r"^scale must be"):
        scaler.update(new)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "new, after", [(math.nan, 8.0), (math.inf, 8.0), (0.0, 8.0), (-4.0, 8.0), (1e-30, 0.5), (1e30, 64.0)]
)
def test_update_by_a_tensor_stays_within_limits_unread(new: float, after: float) -> None:
    scaler = Fp8GradScaler("cpu", init_scale=8.0, floor=0.5, cap=64.0)
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(new))
    assert scaler.get_scale() == after


def test_what_torch_asserts_is_asserted() -> None:
    scaler = Fp8GradScaler("cpu")
    with pytest.raises(AssertionError, match="Attempted update"):
        scaler.update()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    for wrong in (torch.ones(2), torch.ones((), requires_grad=True)):
        with pytest.raises(AssertionError, match="one element"):
            scaler.update(wrong)


def test_settings_through_torchs_methods() -> None:
    scaler = Fp8GradScaler("cpu")
    scaler.set_growth_factor(4.0), scaler.set_backoff_factor(0.25), scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 7)
    found = scaler.settings
    assert (found.growth_factor, found.backoff_factor, found.growth_interval) == (4.0, 0.25, 7)
    for method in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval):
        with pytest.raises(SettingRefused):
            method(math.nan)
    assert scaler.settings == found


def test_disabled_it_is_torchs_disabled_one() -> None:
    scaler = Fp8GradScaler("cpu", enabled=False)
    net = plain_model()
    scaler.watch(net)
    scaler.retune(hysteresis=3)
    scaler.set_scale(4.0)
    loss = loss_of(net)
    assert scaler.scale(loss) is loss and scaler.state_dict() == {} and scaler.get_scale() == 1.0
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert train(pickle.loads(pickle.dumps(scaler)), net, sgd(net), 2) == [1.0, 1.0]


# -- retuned -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("used", [False, True])
def test_retune_is_in_force_at_once_or_not_at_all(used: bool) -> None:
    scaler = Fp8GradScaler("cpu", init_scale=1024.0)
    if used:
        scaler.scale(torch.ones(()))
    with pytest.raises(SettingRefused, match="floor 8 is over cap 4"):
        scaler.retune(margin=1.0, floor=8.0, cap=4.0)
    with pytest.raises(SettingRefused, match="init_scale can't be retuned"):
        scaler.retune(margin=1.0, init_scale=2.0)
    assert scaler.settings.margin == 3.0
    scaler.retune(cap=64.0, hysteresis=3)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == 64.0 and scaler.figures()["hysteresis_tracker"] == 3
    scaler.retune(floor=128.0, cap=None)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("used", [False, True])
def test_set_scale_forgets_what_bad_steps_taught(used: bool) -> None:
    scaler = Fp8GradScaler("cpu", cap=512.0, growth_interval=2000)
    state = scaler.state_dict()
    state["fp8console"]["state"].update(ceiling=4.0, refused=3)
    scaler.load_state_dict(state)
    if used:
        scaler.scale(torch.ones(()))
        assert scaler.figures()["ceiling"] == 4.0
    scaler.set_scale(2048.0)
    scaler.scale(torch.ones(()))
    figures = scaler.figures()
    assert (figures["scale"], figures["ceiling"], figures["refused"]) == (512.0, math.inf, 0)
    with pytest.raises(SettingRefused, match=r"^scale must be"):
        scaler.set_scale(0.0)


# -- saved and loaded ----------------------------------------------------------------------------------------------
def worn(**settings: Any) -> Fp8GradScaler:
    """A scaler with every part of its state away from where it begins."""
    scaler = Fp8GradScaler("cpu", "article", fmt="e4m3fnuz", **{"margin": 2.0, "floor": 0.25, **settings})
    scaler.scale(torch.ones(()))
    values = [96.0, 5, 1, -9.5, 7, -2, 1, 3, 512.0, 11, 13]
    for name, value in zip(scaling_rules.ScaleState._fields, values):
        getattr(scaler, f"_{name}").fill_(value)
    return scaler


def test_state_dict_is_whole_and_plain() -> None:
    scaler = worn()
    state = torch.load(_saved(scaler.state_dict()), weights_only=True)
    other = Fp8GradScaler("cpu")
    for fresh in (True, False):
        other.load_state_dict(state)
        assert other.state_dict() == scaler.state_dict() and other.figures() == scaler.figures(), fresh
        assert other.settings == scaler.settings and other.fmt is scaler.fmt and other.preset == "article"
        other.scale(torch.ones(()))
        other._scale.fill_(1.0)  # type: ignore[union-attr]
        other._outliers.zero_()  # type: ignore[attr-defined]


def _saved(value: Any) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_from_stock_to_ours_and_back() -> None:
    stock = torch.amp.GradScaler("cpu", growth_interval=4, growth_factor=4.0, backoff_factor=0.25)
    net = plain_model()
    train(stock, net, sgd(net), 3, bad=(0,))
    ours = worn()
    ours.load_state_dict(stock.state_dict())
    figures = ours.figures()
    assert (figures["scale"], figures["growth_tracker"]) == (16384.0, 2)
    assert figures["headroom"] is None and figures["ceiling"] == math.inf and figures["outliers"] == 0
    assert ours.settings.growth_interval == 4 and ours.settings.margin == 2.0
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == stock.state_dict()
    assert train(back, net, sgd(net), 2) == [16384.0, 65536.0]


def test_a_loaded_scale_is_brought_within_limits() -> None:
    ours = Fp8GradScaler("cpu", cap=1024.0)
    ours.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    ours.scale(torch.ones(()))
    assert ours.get_scale() == 1024.0


BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda s: s.update(scale=0.0), "scale"),
    (lambda s: s.update(scale=math.nan), "scale"),
    (lambda s: s.update(scale="big"), "scale"),
    (lambda s: s.pop("scale"), "no scale"),
    (lambda s: s.pop("growth_factor"), "growth_factor"),
    (lambda s: s.update(growth_factor=math.nan), "growth_factor"),
    (lambda s: s.update(growth_interval=0), "growth_interval"),
    (lambda s: s.update(_growth_tracker="x"), "growth_tracker"),
    (lambda s: s.update(_growth_tracker=-1), "growth_tracker"),
    (lambda s: s.update(fp8console="x"), "damaged"),
    (lambda s: s.update(fp8console=None), "damaged"),
    (lambda s: s["fp8console"].pop("settings"), "damaged"),
    (lambda s: s["fp8console"].update(settings={"colour": 1}), "colour"),
    (lambda s: s["fp8console"]["settings"].update(margin=math.nan), "margin"),
    (lambda s: s["fp8console"]["settings"].update(floor=2.0, cap=1.0), "floor"),
    (lambda s: s["fp8console"].update(format="e9m9"), "e9m9"),
    (lambda s: s["fp8console"].update(state=[1]), "state"),
    (lambda s: s["fp8console"]["state"].update(typical=math.nan), "typical"),
    (lambda s: s["fp8console"]["state"].update(ceiling=0.0), "ceiling"),
    (lambda s: s["fp8console"]["state"].update(measured=1.5), "measured"),
    (lambda s: s["fp8console"]["state"].update(refused=None), "refused"),
]


@pytest.mark.parametrize("breaks, words", BROKEN)
@pytest.mark.parametrize("used", [False, True])
def test_a_refused_load_changes_nothing(breaks: Callable[[dict[str, Any]], Any], words: str, used: bool) -> None:
    state = worn().state_dict()
    breaks(state)
    scaler = Fp8GradScaler("cpu")
    if used:
        scaler.scale(torch.ones(()))
    before = scaler.state_dict(), scaler.fmt, scaler.preset, scaler.settings
    with pytest.raises(ValueError, match=words) as refused:
        scaler.load_state_dict(state)
    assert "\n" not in str(refused.value)
    assert (scaler.state_dict(), scaler.fmt, scaler.preset, scaler.settings) == before
    scaler.scale(torch.ones(()))
    assert scaler.state_dict() == before[0]


def test_an_empty_state_is_refused_in_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="disabled instance"):
        Fp8GradScaler("cpu").load_state_dict({})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_goes_on_as_the_first_would(copied: Callable[[Any], Any]) -> None:
    assert copied(Fp8GradScaler("cpu", "article")).state_dict() == Fp8GradScaler("cpu", "article").state_dict()
    scaler, nets = Fp8GradScaler("cpu"), [counting_model()]
    scaler.watch(nets[0])
    train(scaler, nets[0], sgd(nets[0]), 4, bad=(2,))
    scaler.scale(torch.ones(()))  # between two calls of scale()
    nets.append(copy.deepcopy(nets[0]))
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict()
    other.watch(nets[1])
    scales = [train(item, net, sgd(net), 6, bad=(3,)) for item, net in zip((scaler, other), nets)]
    assert scales[0] == scales[1] and other.state_dict() == scaler.state_dict()
