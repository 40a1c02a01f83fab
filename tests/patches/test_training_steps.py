"""What a driver hears of Megatron's training: on stubs, and that the real functions have the parameters meant."""

import inspect

import pytest
import torch

from megatron_hybrid.patches import training_steps as steps


class Driver:
    def __init__(self):
        self.heard = []

    def __getattr__(self, name):
        return lambda *args: self.heard.append((name, *args))


@pytest.fixture
def chunk():
    """A model chunk inside two wrappers, as Megatron's precision and data-parallel ones."""
    inner = torch.nn.Linear(2, 2)
    setattr(inner, steps.DRIVER, Driver())
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = inner
    return wrapped


def train_step(result):
    def train_step(forward_step_func, data_iterator, model, optimizer, iteration=None):
        if isinstance(result, Exception):
            raise result
        return result

    return steps.around_train_step(train_step)


def forward_step(func, data, model, current_microbatch=None):
    output = torch.ones(1, requires_grad=True) * 2
    return ([output] if func == "list" else output), 7


def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
    return "gradient"


def test_the_driver_is_found_inside_wrappers(chunk):
    assert steps.driver_of(chunk) is steps.driver_of(chunk.module.module) is not None
    assert steps.driver_of(torch.nn.Linear(2, 2)) is None


def test_a_step_begins_and_ends(chunk):
    driver, done = steps.driver_of(chunk), ({}, 0, False, False, 0, 1.0, None, 0)
    assert train_step(done)(None, None, [chunk], None, iteration=4) is done
    assert driver.heard == [("begin_step", 4), ("end_step", True, False)]


def test_a_step_that_stops_or_fails_is_not_completed(chunk):
    driver = steps.driver_of(chunk)
    train_step(({}, True, True, True, 0, None, None, 0))(None, None, [chunk], None)
    with pytest.raises(RuntimeError, match="lost"):
        train_step(RuntimeError("lost"))(None, None, [chunk], None)
    begun = ("begin_step", None)
    assert driver.heard == [begun, ("end_step", False, True), begun, ("end_step", False, False)]


def test_a_step_that_loss_scaling_skips_is_completed(chunk):
    train_step(({}, 1, False, False, 0, None, None, 0))(None, None, [chunk], None, iteration=4)
    assert steps.driver_of(chunk).heard == [("begin_step", 4), ("end_step", True, True)]


@pytest.mark.parametrize("func", ["list", "tensor"])
def test_a_backward_knows_the_microbatch_of_its_forward(chunk, func):
    """Two forwards, then their backwards: as a pipeline does."""
    forward, backward = steps.around_forward_step(forward_step), steps.around_backward_step(backward_step)
    outputs = [forward(func, None, chunk, current_microbatch=j) for j in (0, 1)]
    assert [tokens for _, tokens in outputs] == [7, 7]
    assert [backward(None, output, None, None) for output, _ in outputs] == ["gradient"] * 2
    assert steps.driver_of(chunk).heard == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]


def test_models_without_a_driver_pass():
    plain, done = torch.nn.Linear(2, 2), ({}, 0, False, False)
    assert train_step(done)(None, None, [plain], None) is done
    output, _ = steps.around_forward_step(forward_step)(None, None, plain, current_microbatch=0)
    assert not hasattr(output, steps.MARK)
    assert steps.around_backward_step(backward_step)(None, output, None, None) == "gradient"


def test_the_real_functions_have_the_parameters_meant():
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    for function, names in (
        (training.train_step, {"model", "iteration"}),
        (schedules.forward_step, {"model", "current_microbatch"}),
        (schedules.backward_step, {"output_tensor"}),
    ):
        assert names <= set(inspect.signature(function).parameters), function
    returned = [line for line in inspect.getsource(training.train_step).splitlines() if "should_exit, exit_code" in line]
    places = [line.split("return")[-1].split(",") for line in returned if "return" in line]
    assert {names[steps._SHOULD_EXIT].strip() for names in places} == {"should_exit"}
    assert {names[steps._SKIPPED].strip() for names in places} == {"skipped_iter", "True"}  # True: where it stopped


def test_the_driver_ignores_evaluation_and_follows_steps():
    from megatron_hybrid.mcore.driver import Driver as Real

    heard = Driver()
    driver = Real(heard)
    driver.has_begun = driver.has_seen_weights = True
    driver.forward(3)
    driver.backward(3)
    assert heard.heard == []
    driver.has_seen_weights = False  # as after a step: evaluation looks at the weights anew, once
    driver.forward(3)
    driver.forward(4)
    assert heard.heard == [("invalidate",)]
    heard.heard.clear()
    driver.in_step = True
    driver.forward(1)
    driver.backward(0)
    driver.end_step(False)
    assert heard.heard == [("microbatch", 1), ("microbatch", 0), ("microbatch", 0)] and not driver.in_step
    driver.end_step(True)
    assert heard.heard[-1] == ("end_step", None, ())
    driver.end_step(True, True)
    assert heard.heard[-2:] == [("forget_overflow",), ("end_step", None, ())]
