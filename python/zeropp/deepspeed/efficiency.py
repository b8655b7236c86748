# SPDX-License-Identifier: Apache-2.0
"""Data efficiency in DeepSpeed's engine: shorter batches, a loader with a curriculum, rates by layer tokens."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeropp.config import Config, Efficiency, LayerDrop, TokenDrop, wrong
from zeropp.config.deepspeed_efficiency import ROUTING, ltd_schedule
from zeropp.config.deepspeed_json import refuse_unknown
from zeropp.config.efficiency import Curriculum
from zeropp.data.cutting import cut_to, length_of
from zeropp.data.sampling import LaterSampler
from zeropp.deepspeed.saving import Saving
from zeropp.efficiency.token_drop import layer_tokens
from zeropp.errors import ConfigError
from zeropp.optim import LayerTokenLR

_RATES = "layer_token_lr_schedule"
_NO_CURRICULUM = (
    "the engine's loader has no curriculum; give initialize training_data, and data_efficiency.data_sampling.curriculum_learning in the "
    "configuration"
)


def takes(model: nn.Module, keyword: str) -> bool:
    """Return True if a model's forward has this keyword, or ``**kwargs`` of which it reads it, as models written for DeepSpeed do."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    reads = code is not None and bool(code.co_flags & inspect.CO_VARKEYWORDS) and keyword in code.co_consts
    return reads or keyword in inspect.signature(model.forward).parameters


class ProgressiveLayerDrop:
    """``deepspeed.runtime.progressive_layer_drop.ProgressiveLayerDrop``: theta by step, for models that drop layers by themselves."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self._drop, self._step = LayerDrop(theta=theta, gamma=gamma), 0
        self.theta, self.gamma = theta, gamma

    def update_state(self, global_step: int) -> None:
        self._step = global_step

    def get_theta(self) -> float:
        return self._drop.at(self._step)

    def get_state(self) -> dict[str, Any]:
        """Return the keywords for the model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}


def for_model(model: nn.Module, settings: Config) -> Config:
    """Return what ``prepare`` attaches to a model: not the loader's curriculum, nor layer dropping that the model does by itself."""
    asked = settings.efficiency
    if asked is None:
        return settings
    drop = None if takes(model, "pld_theta") else asked.layer_drop
    return dataclasses.replace(settings, efficiency=dataclasses.replace(asked, curriculum=None, layer_drop=drop))


def take_rates(keys: dict[str, Any], other: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Take random-LTD's ``layer_token_lr_schedule`` out of a file. Return it and the section ``random_ltd``; None where it is off.

    Args:
        other: another schedule of rates, beside which this one is refused.
    """
    section: Any = keys
    for name in ROUTING.split("."):
        section = section.get(name) if isinstance(section, Mapping) else None
    rates = section.get(_RATES) if isinstance(section, Mapping) else None
    if not (isinstance(rates, Mapping) and rates.get("enabled") is True and section.get("enabled") is True):
        return None
    if other is not None:
        raise ConfigError(f"{ROUTING}.{_RATES}: there is another schedule of rates, too; give one of the two")
    refuse_unknown(
        rates, ("enabled", "total_layer_tokens", "warmup_type", "warmup_layer_tokens"), f"{ROUTING}.{_RATES}"
    )
    left: Any = {key: value for key, value in section.items() if key != _RATES}
    keys["data_efficiency"] = {
        **keys["data_efficiency"],
        "data_routing": {**keys["data_efficiency"]["data_routing"], "random_ltd": left},
    }
    return rates, section


def make_rates(found: tuple[Mapping[str, Any], Mapping[str, Any]], optimizer: Any, batch: int | None) -> LayerTokenLR:
    """Return the schedule that :func:`take_rates` took.

    Args:
        batch: samples of a step over all ranks.
    """
    rates, section = found
    if batch is None:
        raise ConfigError(f"{ROUTING}.{_RATES}: needs train_batch_size, by which layer tokens are counted")
    total = rates.get("total_layer_tokens")
    if total is None:
        raise wrong(f"{ROUTING}.{_RATES}.total_layer_tokens", total, "the layer tokens of the whole run")
    schedule = section["random_ltd_schedule"]
    drop, longest = TokenDrop(keep=ltd_schedule(schedule)), schedule["max_value"]
    layers, dropping = section["total_layer_num"], section["random_ltd_layer_num"]

    def counts(step: int) -> int:
        return layer_tokens(drop, step, batch, longest, dropping, layers)

    warmup, kind = rates.get("warmup_layer_tokens", 0), rates.get("warmup_type", "linear")
    return LayerTokenLR(optimizer, counts, total=total, warmup=warmup, warmup_type=kind)


class CurriculumLoader(torch.utils.data.DataLoader[Any]):
    """A loader with a curriculum, whose batches a function of the script may change."""

    post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
    """Gets a batch and the state of the curriculum: ``current_difficulties`` by metric, ``curriculum_step``, ``consumed_samples``."""

    def __init__(self, engine: DataEfficiency, sampler: LaterSampler, **more: Any) -> None:
        super().__init__(batch_sampler=sampler, **more)
        self._engine = weakref.ref(engine)

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self.post_process_func is None else self._processed(batches)

    def _processed(self, batches: Iterator[Any]) -> Iterator[Any]:
        sampler: Any = self.batch_sampler
        for batch in batches:
            engine = self._engine()
            if engine is None or self.post_process_func is None:
                return
            step = engine.global_steps
            yield self.post_process_func(batch, {
                "curriculum_step": step + 1, "current_difficulties": sampler.difficulties(step), "consumed_samples": engine.global_samples,
            })  # fmt: skip


class DataEfficiency(Saving):
    """The part of the engine that follows the sections on data efficiency."""

    training_dataloader: Any

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        """Return a forward's arguments in training: cut to the step's length, or with the keywords by which models written for DeepSpeed
        cut and drop by themselves."""
        length = length_of(self.module)
        if length is None or not takes(self.module, "curriculum_seqlen"):
            args, kwargs = cut_to((args, kwargs), length)
        else:
            kwargs = {**kwargs, "curriculum_seqlen": length}
        if self.pld_enabled() and takes(self.module, "pld_theta"):
            kwargs = {**kwargs, "progressive_layer_drop": True, "pld_theta": self.get_pld_theta()}
        return args, kwargs

    def _take_rates(self, found: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> None:
        """Follow the schedule that :func:`take_rates` took, if there is one."""
        if found is not None:
            self.lr_scheduler = make_rates(found, self.optimizer, self.train_batch_size())

    def pld_enabled(self) -> bool:
        return self._efficiency.layer_drop is not None

    def get_pld_theta(self) -> float | None:
        """Return progressive layer dropping's theta as DeepSpeed's engine has it: of the step that ended last, 1 before the first."""
        drop = self._efficiency.layer_drop
        return None if drop is None else drop.at(max(0, self.global_steps - 1))

    @property
    def _efficiency(self) -> Efficiency:
        return self.zeropp_config.efficiency or Efficiency()

    def _curriculum_loader(
        self, curriculum: Curriculum, micro_batch: int, workers: int | None, *, dataset: Any, **more: Any
    ) -> CurriculumLoader:
        whole = micro_batch * self.world_size * self.gradient_accumulation_steps()
        sampler = LaterSampler(curriculum, dataset, batch=whole, micro_batch=micro_batch, seed=self._efficiency.seed)
        count = curriculum.workers if workers is None else workers
        return CurriculumLoader(self, sampler, dataset=dataset, num_workers=count, **more)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Let a function change the batches of the loader, such as cut them to the difficulty of a metric that counts tokens.

        Args:
            post_process_func: gets the batch and the curriculum's state, whose ``current_difficulties`` has a value for each metric.

        Raises:
            zeropp.ConfigError: the engine's loader has no curriculum.
        """
        if not isinstance(self.training_dataloader, CurriculumLoader):
            raise ConfigError(f"set_data_post_process_func: {_NO_CURRICULUM}")
        self.training_dataloader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], float]]) -> None:
        """Give the functions of curriculum metrics whose schedule_type is "custom"; they get the step, counted from 1.

        Raises:
            zeropp.ConfigError: there is no curriculum, the metric's schedule is another, or batches were drawn already.
        """
        sampler = getattr(self.training_dataloader, "batch_sampler", None)
        if not isinstance(sampler, LaterSampler):
            raise ConfigError(f"set_custom_curriculum_learning_schedule: {_NO_CURRICULUM}")
        sampler.set_schedules(schedule_func_dict)
