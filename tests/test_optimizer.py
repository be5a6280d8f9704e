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
        ({"adam_beta1": 0}, r"adam_beta1=0, adam_beta2=0\.999, .* does not work: betas must be either both floats"),
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 1e-4, "betas": (0.9, 1.5)}, "Invalid beta parameter at index 1: 1.5"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"lr": 1e-4, "momentum": 0.9}, "unexpected keyword argument 'momentum'"),
        (None, "NoneType"),
    ],
)
def test_options_that_a_given_optimizer_does_not_take_are_refused(options, words):
    with pytest.raises(ConfigError, match=rf"^optimizer_cls_and_kwargs=\(AdamW, .* cannot be built: .*{words}"):
        checks.check_collator_and_optimizer(None, (None, None), (torch.optim.AdamW, options))
    checks.check_collator_and_optimizer(None, (None, None), (torch.optim.AdamW, {"lr": 1e-4, "eps": math.ulp(1)}))
