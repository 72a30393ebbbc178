"""The training loop: one trial on one device, read from top to bottom.

Initial weights come from (study seed, trial number). The forward's random draws are keyed by (trial seed, step, call),
and torch's generators are seeded by (trial seed, step) for draws that cannot be. So a trial that is stopped at any step
and continued in another process goes on as if it had never stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from penstock.errors import TaskError
from penstock.numeric import sort
from penstock.seeds import key
from penstock.surrogate.task import rates_of
from penstock.task import Task, task_name
from penstock.training.checkpoint import State
from penstock.training.copying import on_host
from penstock.training.data import Data, batch_size, handed_out
from penstock.training.keeping import kept, look, put
from penstock.training.lazy import fill
from penstock.training.random.generators import position, random_state, seed_everything, set_random_state
from penstock.training.random.keyed import Solo
from penstock.training.rates import Factor, at_rates
from penstock.training.returned import made_model, split_scheduler
from penstock.training.schedulers import writes
from penstock.training.spread.parts import InParts, Part
from penstock.training.uncompiled import step, uncompiled
from penstock.trial import Config, Metrics, Mode, score


class Training:
    """A trial in training. ``steps`` trains it; between two steps ``state`` gives all it needs to go on."""

    # Made by ``optimize``, and made again when the parameters are shared out.
    optimizer: torch.optim.Optimizer
    scheduler: Any
    every_step: bool  # whether the scheduler steps at every step, or at every unit
    numbered: bool  # whether it is told the number of both, as those of timm are
    writing: bool  # whether it may write values outside of the model, which are this trial's own then
    zeroed: list[nn.Parameter] | None  # the parameters whose gradients are dropped by hand
    groups: int  # how many groups of parameters the optimizer had then
    rates: Mapping[str, Factor]  # factors of the learning rate, by parameter, where they are not 1
    closure: bool  # whether the optimizer evaluates the loss itself

    can_stop = True  # at every step
    can_divide = True
    urgent = False  # a state can be made at any time

    def __init__(
        self,
        task: Task,
        trial: int,
        config: Config,
        data: Data,
        *,
        seed: int,
        device: torch.device,
        metric: str,
        mode: Mode,
    ) -> None:
        self.task, self.config, self.data, self.device = task, config, data, device
        self.metric, self.mode = metric, mode
        self.seed = key(seed, "trial", trial)
        self.batch_size = batch_size(task, config, data.train.length)
        seed_everything(key(seed, "weights", trial))
        before = look(task)
        put(task, data.left)
        self.model = self.filled(self.brought(made_model(task, config)))
        self.optimize()
        self.kept = kept(task, self.model, before, data.left)
        self.scaler = torch.amp.GradScaler(device.type) if task.precision == "fp16" else None
        # The random draws of the loss, and those of the metrics.
        functions = (task.loss, task.metrics)
        self.randomness, self.eval_randomness = (Solo(self.model, _generators(device), one) for one in functions)
        self.parts = 1  # how many parts a batch is taken in, one after another
        self._taken = Part(0, self.batch_size, self.batch_size)  # the part that is computed now
        self.take_up(None)
        self._undrawn = position()
        # The position: units reported, steps trained in all and in this unit, epoch, and place in its order.
        self.unit = self.step = self.unit_step = self.epoch = self.place = 0
        # The weights at the best report so far, so that the best trial's model is the one that was measured.
        self.best_score, self.best_unit, self.best_step = float("-inf"), 0, 0
        self.best_model: Mapping[str, torch.Tensor] = {}

    def read_from(self, config: Config) -> None:
        """Let the task read its values from another form of the same config."""
        self.config = config

    def brought(self, model: nn.Module) -> nn.Module:
        """A new model, brought to the device that it trains on."""
        return model.to(self.device)

    def filled(self, model: nn.Module) -> nn.Module:
        """A new model, whose lazy parameters have got their shapes from the first batch."""
        return fill(model, self._first_forward)

    def _first_forward(self, model: nn.Module) -> None:
        batch = next(iter(self.data.train.batches(0, 0, self.batch_size)))
        with self.autocast():
            self.task.loss(model, batch, self.config)

    def optimize(self) -> None:
        """Make the optimizer and the scheduler of the model's parameters."""
        task, config = self.task, self.config
        with uncompiled():
            self.optimizer = task.optimizer(list(self.model.parameters()), config)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TaskError(
                f"{task_name(task)}.optimizer must return a torch optimizer, got {sort(self.optimizer)}: return one of "
                "the params that it is given, such as torch.optim.SGD(params, lr=0.1)."
            )
        self.rates = rates_of(task, self.model, self.optimizer)
        # Dropping gradients by hand does what zero_grad does without its profiling, which a small model's step feels.
        plain = type(self.optimizer).zero_grad is torch.optim.Optimizer.zero_grad
        self.zeroed = [p for group in self.optimizer.param_groups for p in group["params"]] if plain else None
        self.groups = len(self.optimizer.param_groups)
        self.closure = isinstance(self.optimizer, torch.optim.LBFGS)
        self.scheduler, self.every_step = split_scheduler(task.scheduler(self.optimizer, config))
        self.numbered = callable(getattr(self.scheduler, "step_update", None))
        self.writing = bool(writes(self.scheduler))

    def take_up(self, random: State | None) -> None:
        """Set the global generators to where this trial left them; None where it has drawn nothing from them yet.

        The task has this trial's values again too, where making a model leaves some outside of the model.
        """
        self.kept.bring_back()
        if random is None:
            seed_everything(self.seed)
        else:
            set_random_state(random)

    def steps(self) -> Generator[Metrics | None, None, None]:
        """Train for ever: None after a step, the metrics after a unit."""
        while True:
            self.model.train()
            for batch in self.batches():
                self.train_step(batch)
                if self.count_step():
                    break
                yield None
            else:
                continue  # the epoch ended inside a unit
            metrics = self.evaluate()
            if self.count_unit(metrics):
                self.keep_best(self.weights())
            yield metrics

    def keep_best(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold these weights as those of the best report so far; empty where something else holds them."""
        self.best_model = weights

    def weights(self) -> Mapping[str, torch.Tensor]:
        """A copy of the model's weights, on the CPU."""
        return on_host(self.model.state_dict())

    def batches(self) -> Iterator[Any]:
        """The rest of the epoch's batches."""
        return self.data.train.batches(self.epoch, self.place, self.batch_size)

    def train_step(self, batch: Any) -> None:
        """One step of the optimizer."""
        optimizer: Any = self.optimizer
        if self.closure:
            optimizer.step(partial(self.backward, batch))
            return
        self.backward(batch)
        if self.scaler is None:
            self.step_optimizer()
        else:
            with at_rates(optimizer, self.model, self.rates):
                self.scaler.step(optimizer)
            self.scaler.update()

    def step_optimizer(self) -> None:
        """A step by the gradients that there are, each parameter at its own factor of the learning rate."""
        with at_rates(self.optimizer, self.model, self.rates):
            step(self.optimizer)

    def count_step(self) -> bool:
        """Move on to the next batch; whether that ends a unit."""
        if self.scheduler is not None:
            if self.numbered:
                self.scheduler.step_update(self.step + 1)
            elif self.every_step:
                self.scheduler.step()
            if self.writing:
                self.kept.renew()
        self.step += 1
        self.unit_step += 1
        self.place += self.batch_size
        if self.place >= self.data.train.length:
            self.epoch, self.place = self.epoch + 1, 0
        unit_steps = self.task.unit_steps
        return self.unit_step == unit_steps or (unit_steps is None and self.place == 0)

    @property
    def unit_length(self) -> int:
        """Steps in a unit."""
        return self.task.unit_steps or -(-self.data.train.length // self.batch_size)

    def count_unit(self, metrics: Metrics) -> bool:
        """Move on to the next unit; whether its report is the best so far."""
        scheduler = self.scheduler
        if scheduler is not None and self.numbered:
            scheduler.step(self.unit + 1, metrics[self.metric])
        elif scheduler is not None and not self.every_step:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(metrics[self.metric])
            else:
                scheduler.step()
        if self.writing:
            self.kept.renew()
        self.unit += 1
        self.unit_step = 0
        value = score(metrics, self.metric, self.mode)
        if value <= self.best_score:
            return False
        self.best_score, self.best_unit, self.best_step = value, self.unit, self.step
        return True

    def backward(self, batch: Any) -> torch.Tensor:
        """The gradients of one batch, clipped; gives its loss."""
        if self.zeroed is None or len(self.optimizer.param_groups) != self.groups:  # a scheduler may add a group
            self.optimizer.zero_grad()
        else:
            for parameter in self.zeroed:
                parameter.grad = None
        loss = self._backward(batch) if self.parts == 1 else self._accumulate(batch)
        if self.task.clip_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_grad_norm)
        return loss

    def _backward(self, batch: Any, weight: float = 1.0) -> torch.Tensor:
        with self.randomness.at(self.seed, self.step):
            loss = self._loss(batch)
            if weight != 1:
                loss = loss * weight
            self.randomness.backward(loss if self.scaler is None else self.scaler.scale(loss))
        return loss

    def divide(self, parts: int) -> str:
        """Take every batch in so many parts from now on, as memory is short; gives why not, where that would differ."""
        if reason := self._indivisible(parts):
            return reason
        batch = next(iter(self.data.train.batches(self.epoch, self.place, self.batch_size)))
        first = Part.of(self._rows(), 0, parts)
        try:
            if reason := self._unlike(first.cut(batch), first.rows):
                return reason
        except ValueError as error:
            return f"its batches cannot be cut: {error}"
        self.parts = parts
        self.randomness = InParts(self.model, self.randomness.generators, lambda: self._taken)
        return ""

    def _indivisible(self, parts: int) -> str:
        if parts > self.batch_size:
            return "a part of a batch is one sample already"
        if not self.task.accumulate and any(isinstance(one, _BatchNorm) for one in self.model.modules()):
            return "BatchNorm would see parts of a batch: set accumulate = True in the task to accept that"
        return ""

    @torch.no_grad()
    def _unlike(self, batch: Any, rows: int) -> str:
        """Why the loss of a batch, which fits into memory, is not the mean over its samples; nothing where it is."""
        self.model.eval()
        keyed = InParts(self.model, self.randomness.generators, lambda: self._taken)
        losses = []
        for self._taken in (Part.of(rows, 0, 1), *(Part.of(rows, rank, 3) for rank in range(3))):
            with keyed.at(self.seed, self.step):  # what a part draws is its rows of the whole
                losses.append(self._taken.weight * float(self._loss(self._taken.cut(batch))))
        one, other = losses[0], sum(losses[1:])
        self.model.train()
        if abs(one - other) <= (1e-3 if self.task.precision == "fp32" else 5e-2) * max(abs(one), abs(other)):
            return ""
        return f"the loss of a batch is {one:.6g} and the mean over its parts {other:.6g}: it is no mean over samples"

    def _rows(self) -> int:
        return min(self.batch_size, self.data.train.length - self.place)

    def _accumulate(self, batch: Any) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        whole = self._rows()
        for rank in range(min(self.parts, whole)):
            self._taken = Part.of(whole, rank, min(self.parts, whole))
            total = total + self._backward(self._taken.cut(batch), self._taken.weight).detach()
        return total

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of one batch, as this step would have it."""
        with self.randomness.at(self.seed, self.step):
            return self._loss(batch)

    def gradients(self, batch: Any, wanted: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of one batch's loss, as this step would have them."""
        with self.randomness.at(self.seed, self.step):
            return self.randomness.gradients(self._loss(batch), wanted)

    def _loss(self, batch: Any) -> torch.Tensor:
        if self.task.precision == "fp32":
            return self.task.loss(self.model, handed_out(batch), self.config)
        with self.autocast():
            return self.task.loss(self.model, handed_out(batch), self.config)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The task's metrics over the validation data: each averaged over the batches that have it, by their length."""
        self.model.eval()
        sums, lengths = dict[str, Any](), Counter[str]()
        on_cpu = self.device.type == "cpu"
        keyed = self.eval_randomness.at(self.seed ^ 1, self.step)
        with self.autocast():
            for number, (batch, length) in enumerate(self.data.valid.all(self.task.eval_batch_size)):
                with keyed.batch(number):
                    values = self.task.metrics(self.model, batch, self.config)
                for name, value in values.items():
                    # Sums stay on an accelerator until the last batch, so that no batch waits for them.
                    mean = float(value) if on_cpu else torch.as_tensor(value, dtype=torch.float64)
                    sums[name] = sums.get(name, 0.0) + mean * length
                    lengths[name] += length
        return {name: float(value) / lengths[name] for name, value in sums.items()}

    def autocast(self) -> AbstractContextManager[object]:
        """The precision that the task's forward runs in."""
        if self.task.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.task.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def state(self, *, drawn: bool = True) -> State:
        """The state that a plain PyTorch run would save, and the position.

        Not ``drawn``: the trial itself has not touched Python's and numpy's generators.
        """
        at_best = self.best_step == self.step and self.best_unit == self.unit
        with uncompiled():
            optimizer = self.optimizer.state_dict()
        return {
            "unit": self.unit,
            "step": self.step,
            "position": {"unit_step": self.unit_step, "epoch": self.epoch, "place": self.place},
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": None
            if not drawn or position() == self._undrawn
            else random_state(with_torch=False),  # most trials draw nothing
            "best": {
                "score": self.best_score,
                "unit": self.best_unit,
                "step": self.best_step,
                "model": None if at_best else self.best_model,  # the model above has the best weights
            },
        }

    def restore(self, state: State, *, inherited: bool) -> None:
        """Go on from a state.

        An inherited state is a donor's, or that of another config. The optimizer made from this trial's own config then
        takes over the per-parameter state alone, and no earlier report counts as this trial's.
        """
        self.unit, self.step = state["unit"], state["step"]
        self.unit_step, self.epoch, self.place = (state["position"][k] for k in ("unit_step", "epoch", "place"))
        self.model.load_state_dict(state["model"])
        with uncompiled():
            if inherited:
                own = self.optimizer.state_dict()
                self.optimizer.load_state_dict({**state["optimizer"], "param_groups": own["param_groups"]})
                return
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.take_up(state["random"])
        best = state["best"]
        self.best_score, self.best_unit, self.best_step = best["score"], best["unit"], best["step"]
        self.best_model = on_host(state["model"] if best["model"] is None else best["model"])


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators
