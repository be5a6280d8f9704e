"""An optimizer that cannot be built, or cannot work, is refused when the config is built."""

import math

import pytest
import torch

from hf_megapack import checks
from hf_megapack.arguments import ELEMENTWISE_OPTIMIZERS
from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError


@pytest.fixture
def build(tmp_path):
    return lambda **options: MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adam_epsilon": 0.0}, r"adam_epsilon=0\.0 would make factors NaN or infinite within two updates"),
        ({"adam_epsilon": 1e-60}, "adam_epsilon=1e-60 would make factors NaN or infinite"),
        ({"learning_rate": 1e39}, r"learning_rate=1e\+39, "),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args='momentum' is not understood. Write name=value"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,"}, "is not understood"),
        ({"optim": "sgd", "optim_args": "momentum=0.9=3"}, "is not understood"),
        ({"optim": "sgd", "optim_args": "momentum=0.9, momentum=0.5"}, "is not understood. .*every name once"),
        ({"optim": "sgd", "optim_args": "momentum=a"}, "optim_args='momentum=a' does not work: could not convert"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "does not work: Invalid momentum value: -1.0"),
        ({"optim": "sgd", "optim_args": "momentum=nan"}, "optim_args='momentum=nan' would make factors NaN"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "does not work: Nesterov momentum requires a momentum"),
        ({"optim": "sgd", "optim_args": "nesterov=maybe"}, "has nesterov=maybe, which would count as false"),
        ({"optim": "rmsprop", "optim_args": "centered=2"}, "has centered=2, which would count as false"),
        ({"optim": "rmsprop", "optim_args": "alpha=2"}, "optim_args='alpha=2' would make factors NaN"),
        ({"optim": "rmsprop", "optim_args": "eps=-1"}, "does not work: Invalid epsilon value"),
        ({"optim": "adagrad", "optim_args": "lr_decay=-1"}, "does not work: Invalid lr_decay value"),
        ({"optim": "adagrad", "optim_args": "eps=0"}, "optim_args='eps=0' would make factors NaN"),
    ],
)
def test_what_torch_refuses_or_cannot_use_is_refused_by_name(build, options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


@pytest.mark.parametrize("optim", ELEMENTWISE_OPTIMIZERS)
def test_every_optimizer_can_be_chosen(build, optim):
    assert build(optim=optim).optim == optim


@pytest.mark.parametrize(
    "options",
    [
        {"adam_beta1": 0.0, "adam_beta2": 0.0, "weight_decay": 1},
        {"adam_beta1": 0},
        {"adam_beta2": 0},
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True", "learning_rate": 0},
        {"optim": "rmsprop", "optim_args": "alpha=0.5,momentum=0.9,centered=yes,eps=1e-4"},
        {"optim": "adagrad", "optim_args": "lr_decay=0.1"},
    ],
)
def test_what_torch_can_use_is_taken(build, options):
    build(**options).check()


def test_trying_an_optimizer_leaves_the_random_numbers_alone(build):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build()
    assert torch.equal(torch.rand(1), expected)


def test_a_beta_that_is_set_later_is_refused_before_data_is_read(make):
    args = make().args
    args.adam_beta1 = 1.5
    with pytest.raises(ConfigError, match=r"adam_beta1=1\.5 is not allowed; .*at least 0 and below 1"):
        checks.check_args(args)


def check_given(optimizer_class, options, weight_decay=0.0):
    checks.check_collator_and_optimizer(None, (None, None), (optimizer_class, options), weight_decay=weight_decay)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 1e-4, "betas": (0.9, 1.5)}, "Invalid beta parameter at index 1: 1.5"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"lr": 1e-4, "momentum": 0.9}, "unexpected keyword argument 'momentum'"),
        ({"lr": 1e-4, "differentiable": True}, r"leaf Variable .* in-place operation\. Change"),
        (None, "NoneType"),
    ],
)
def test_options_that_a_given_optimizer_does_not_take_are_refused(options, words):
    with pytest.raises(ConfigError, match=rf"^optimizer_cls_and_kwargs=\(AdamW, .* does not work: .*{words}"):
        check_given(torch.optim.AdamW, options)
    check_given(torch.optim.AdamW, {"lr": 1e-4, "eps": math.ulp(1)})


def test_a_given_optimizer_that_would_make_nans_is_refused():
    with pytest.raises(ConfigError, match=r"'eps': 0\.0.* would make factors NaN or infinite within two updates"):
        check_given(torch.optim.AdamW, {"lr": 1e-4, "eps": 0.0})


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "betas": [0.9, 0.95], "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "capturable": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        (torch.optim.NAdam, {"lr": 1e-3, "decoupled_weight_decay": True}),
        (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_options_of_torch_are_taken(optimizer_class, options):
    """Also capturable, which torch refuses on a CPU: the trial is on one, training need not be."""
    check_given(optimizer_class, options)


def test_weight_decay_of_a_given_optimizer_is_not_ignored():
    """Every group of the HF Trainer has that of the config, which wins over the optimizer's own."""
    with pytest.raises(
        ConfigError, match=r"'weight_decay': 0\.5.* ignored in weight_decay: .* MegaPackConfig.* 0\.1\."
    ):
        check_given(torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.5}, weight_decay=0.1)
    check_given(torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1}, weight_decay=0.1)
    check_given(torch.optim.AdamW, {"lr": 1e-4}, weight_decay=0.1)


class Pairs(torch.optim.AdamW):
    """A user's own: it has an option more, and looks at what it updates."""

    def __init__(self, params, *, num_updates, lr=1e-3):
        super().__init__(params, lr=lr)
        self.num_updates = num_updates
        if sum(parameter.numel() for parameter in self.param_groups[0]["params"]) < 100:
            raise ValueError("few parameters: is this the model?")


class WithClosure(torch.optim.SGD):
    """A user's own that computes the loss itself."""

    def step(self, closure):
        """Call the closure, then step."""
        with torch.enable_grad():
            closure()
        return super().step()


def test_an_optimizer_of_the_users_own_is_not_tried_on_other_parameters(make):
    with pytest.raises(ConfigError, match=r"\(Pairs, .* does not work: missing a required .*'num_updates'"):
        check_given(Pairs, {"lr": 1e-3})
    check_given(Pairs, {"lr": 1e-3, "num_updates": 9})
    trainer = make(max_steps=1)
    trainer.optimizer_cls_and_kwargs = (Pairs, {"num_updates": 9})
    trainer.train()
    assert trainer.optimizer.optimizer.num_updates == 9


def test_an_optimizer_that_needs_a_closure_is_refused(make):
    with pytest.raises(ConfigError, match=r"WithClosure\.step\(\) cannot be called without arguments .*'closure'"):
        check_given(WithClosure, {"lr": 1e-3})
    trainer = make()
    trainer.optimizer = WithClosure(trainer.backend.parameters.values(), lr=1e-3)
    with pytest.raises(ConfigError, match="WithClosure"):
        trainer.train()


@pytest.mark.parametrize("given", [torch.optim.AdamW, (torch.optim.AdamW,), "adamw_torch"])
def test_what_is_no_pair_is_refused(given):
    with pytest.raises(ConfigError, match=r"^optimizer_cls_and_kwargs=.* is no pair of a class and its keyword"):
        checks.check_collator_and_optimizer(None, (None, None), given, weight_decay=0.0)
