# SPDX-License-Identifier: Apache-2.0
"""Which options do not combine: one table, which every check asks and from which docs/compatibility.md is made.

A row is (option, its values, other option, its values, reason, way out). A check collects what it knows as facts, a mapping from
the name of an option to the value seen, and asks :func:`check`. A row whose options are not both among the facts says nothing, so
that each caller tells only what it knows: ``Config`` its fields, ``prepare`` the optimizer, the model and the hosts besides.

Every refusal has the same form: ``option: value does not combine with other=value: reason; way out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from zeropp.errors import ConfigError, shown

Facts = Mapping[str, Any]


class Named(NamedTuple):
    """A value that a message calls by other words than ``option=value``, such as ``optimizer LAMB``."""

    value: Any
    words: str


class Values(NamedTuple):
    """Some values of an option: in words for the documentation, and as a test."""

    words: str
    holds: Callable[[Any], bool]


class Row(NamedTuple):
    """Two options that do not combine at these values.

    ``where``: further options that must have these values, too, for the row to hold.
    """

    option: str
    values: Values
    other: str
    others: Values
    reason: str
    way_out: str
    where: Mapping[str, Values] = {}


def these(*values: Any) -> Values:
    return Values(", ".join(map(repr, values)), lambda value: value in values)


def other_than(*values: Any) -> Values:
    return Values("other than " + ", ".join(map(repr, values)), lambda value: value not in values)


def kinds(*names: str) -> Values:
    """Optimizers, by the class whose step they have."""
    return Values(", ".join(names), lambda kind: kind in names)


def other_kinds(*names: str) -> Values:
    return Values(f"any but {', '.join(names)}", lambda kind: kind not in names)


GIVEN = Values("given", lambda value: value is not None)
ANY = Values("any", lambda value: True)
YES = Values("True", bool)
MORE_THAN_ONE = Values("more than one", lambda count: count > 1)
SEVERAL_COUNTS = Values("not the same on every host", lambda counts: counts[0] != counts[1])

# Optimizers, by what their step needs.
ADAMS = ("AdamW", "Adam")
STREAMED = (*ADAMS, "Lion", "Adagrad", "SGD")
ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
NORMS = ("LAMB", "OneBitLamb")
TALKING = ("LAMB", *ONE_BIT, "Muon")
IN_TORCH = ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
UNKNOWN = "a class that zeropp does not know"
CLOSURE = "a class whose step needs a closure"
KNOWN = (*STREAMED, *IN_TORCH, *TALKING)
_USE_STREAMED = f"use one of {', '.join(STREAMED)}"
_LOW = ("bf16", "fp16")
_TRAINED = ("float32", "bfloat16", "float16", "float64")

# Facts that are no fields of Config.
OPTIMIZER = "optimizer"
TRAINED_DTYPE = "dtype of a trained parameter"
UNFREEZING = "unfreezing a parameter"
FROZEN_MODEL = "a model frozen and without an optimizer in prepare"
JOB = "a model on some ranks of a job"
IN_STAGE = "a model on some ranks of a pipeline's stage, or of a job without a pipeline"
CUT = "parameters that are DTensors"
SPREAD = "modules whose parameters differ between ranks"
ANOTHER = "another optimizer for a prepared model"

_BEFORE = "leave the parameter trainable until prepare, and freeze it after"


# fmt: off
def _of_precision() -> Iterator[Row]:
    yield Row("Precision.master", these("bf16"), "Precision.param", other_than(None, "bf16"),
              "a master in bf16 is the parameter itself", "use master='fp32' or None; 'bf16' is for parameters in bf16")
    for low in _LOW:
        yield Row("Precision.compute", other_than(None, low), "Precision.param", these(low),
                  "what is held in 16 bits computes in them", f"use compute={low!r} or None with param={low!r}")
    yield Row("Precision.compute", these("fp32"), "Precision.param", these(None),
              "the model's own types compute as they are", "use None, or param='fp32' with it")
    for low in _LOW:
        for other, others in (("param", other_than(low)), ("reduce", other_than(None, low))):
            yield Row("Precision.accumulate", these(low), f"Precision.{other}", others,
                      "sums are in fp32, or in the one type in which parameters are held and gradients travel", "use accumulate='fp32' or None")
    yield Row("Config.loss_scale", GIVEN, "Config.precision", other_than("fp16"),
              "only fp16 needs a scale", "leave it at None, or use precision='fp16'")


def _of_stages() -> Iterator[Row]:
    for kind, what, least in (
        ("params", "parameters", 3),
        ("grads", "gradients", 2),
        ("optimizer", "optimizer states", 1),
    ):
        stages = " or ".join(str(stage) for stage in range(least, 4))
        yield Row(f"Config.offload.{kind}.kind", other_than("device"), "Config.stage", these(*range(least)),
                  f"{what} are partitioned from stage {least} on", f"leave it on 'device', or use stage {stages}")
    yield Row("Config.comm.params", other_than("exact"), "Config.stage", these(0, 1, 2),
              "parameters are gathered at stage 3 only", "leave it at 'exact', or use stage 3")
    yield Row("Config.comm.secondary_shard", other_than(0), "Config.stage", these(0, 1, 2),
              "parameters are gathered at stage 3 only", "leave it at 0, or use stage 3")
    yield Row("Config.comm.grads", other_than("exact"), "Config.stage", these(0, 1),
              "gradients are compressed where they are reduced to shards", "leave it at 'exact', or use stage 2 or 3")


def _of_files() -> Iterator[Row]:
    for kind in ("params", "grads", "optimizer"):
        yield Row("Precision.state", other_than("fp32"), f"Config.offload.{kind}.kind", these("nvme"),
                  "a step that streams through files takes states in fp32", f"leave it out, or keep offload.{kind} off 'nvme'")
        yield Row("Precision.master", other_than("fp32"), f"Config.offload.{kind}.kind", these("nvme"),
                  "a step that streams through files updates an fp32 copy", f"leave it out, or keep offload.{kind} off 'nvme'")
    yield Row("Precision.stored", GIVEN, "Config.offload.params.kind", these("device"),
              "it is for weights on 'nvme' or 'cpu'", "use None, or put offload.params there")
    yield Row("Config.comm.params", other_than("exact"), "Config.offload.params.kind", these("nvme"),
              "the ranks of a host share what they read, and send nothing", "leave it at 'exact'")
    for low in _LOW:
        yield Row("Config.comm.grads", other_than("exact"), "Precision.reduce", these(low),
                  "each of the two chooses what travels", "use 'exact', or reduce=None",
                  {"Precision.param": other_than(low)})


def _of_steps() -> Iterator[Row]:
    yield Row("Precision.master", other_than("fp32"), "Config.offload.delayed_update", GIVEN,
              "a delayed update needs a copy of the weights that the model does not see", "leave one of the two out")
    yield Row("Config.offload.delayed_update", GIVEN, "Config.offload.optimizer.kind", these("device"),
              "it hides a step of states on 'cpu' or 'nvme'", "use None, or put offload.optimizer there")
    backward = "Config.step_in_backward"
    yield Row(backward, YES, "Config.clip", GIVEN,
              "clipping needs the norm of all gradients before the first step", "leave one of the two out")
    yield Row(backward, YES, "Config.precision", these("fp16"),
              "the loss scale looks at all gradients before the first step", "use False, or bf16")
    yield Row(backward, YES, "Config.stage", these(0),
              "it steps the shards of this rank", "use False, or stage 1, 2 or 3")
    yield Row(backward, YES, "Config.offload.delayed_update", GIVEN,
              "a delayed update hides the step beside the next pass, this one inside the backward", "use one of the two")
    yield Row(backward, YES, "Config.offload.grads.kind", these("nvme"),
              "a gradient lives until its unit is stepped, in the same backward, so there is nothing to keep in a file",
              "keep offload.grads on 'device'; or where several backwards make a step, say how many with accumulate=, since inside no_sync alone "
              "ranks hold their gradients back in memory",
              {"Config.accumulate": these(1)})


def _of_jobs() -> Iterator[Row]:
    yield Row(SPREAD, MORE_THAN_ONE, "Config.offload.params.kind", these("nvme"),
              "over several hosts files have whole units, which ranks of a group would have to gather",
              "leave it on 'device', or use one host", {"hosts": MORE_THAN_ONE})
    yield Row(CUT, YES, OPTIMIZER, kinds("LAMB", "Muon"),
              "its step needs whole tensors, and a rank has a part of them", "use an element-wise optimizer such as AdamW")
    yield Row(CUT, YES, "Precision.stored", GIVEN,
              "rounded weights are read by zeropp's own modules", "leave it out")
    yield Row(JOB, MORE_THAN_ONE, OPTIMIZER, kinds(*ONE_BIT),
              "its own sums are over the ranks that have the model, and the norm is of all", "use AdamW")
    yield Row(JOB, MORE_THAN_ONE, "Config.comm.secondary_shard", other_than(0),
              "the second copy is over all ranks of a host", "leave it at 0")


def _of_optimizers() -> Iterator[Row]:
    yield Row(OPTIMIZER, Values(CLOSURE, lambda kind: kind == CLOSURE), "Config.stage", ANY,
              "its step asks for the loss again, by a closure", f"use one of {', '.join(KNOWN)}")
    yield Row(OPTIMIZER, Values(UNKNOWN, lambda kind: kind == UNKNOWN), "Config.stage", these(1, 2, 3),
              f"it is not among those whose step is known on shards: {', '.join(KNOWN)}",
              "if each element of its step needs that element alone, say Config(custom_optimizer=True), in DeepSpeed's file "
              '"zero_allow_untested_optimizer": true; else use stage 0',
              {"Config.custom_optimizer": these(False)})
    yield Row("Config.stage", these(3), OPTIMIZER, kinds(*ONE_BIT),
              "it sends this rank's own gradients where stage 3 has given them away", "use stage 0, 1 or 2, or AdamW at stage 3")
    yield Row("Config.stage", these(1, 2), "ZeroOneAdam.local_step_clipper", other_than(1),
              "local steps need whole states on every rank", "use local_step_clipper=1, or stage 0")
    yield Row("Precision.stored", GIVEN, OPTIMIZER, ANY,
              "rounded weights are for inference", "call zeropp.prepare(model, None, config), or leave it out")
    yield Row("Config.step_in_backward", YES, OPTIMIZER, kinds(*TALKING),
              "its step needs whole matrices, their norms, or what is sent before the step", "use an element-wise optimizer such as AdamW, or False")
    delayed = "Config.offload.delayed_update"
    yield Row(delayed, GIVEN, OPTIMIZER, kinds(*TALKING),
              "its step talks to the other ranks, which the pass beside it does, too", f"{_USE_STREAMED}, or None")
    yield Row(delayed, GIVEN, OPTIMIZER, other_kinds(*STREAMED),
              "its step is torch's own code, which would wait for the pass beside it", f"{_USE_STREAMED}, or None")
    yield Row("Precision.state", other_than("fp32"), OPTIMIZER, other_kinds(*ADAMS),
              "calls of torch step its states in fewer bits, and would wait for the pass beside the step", "use Adam or AdamW, or leave one of the two out",
              {delayed: GIVEN})
    yield Row("Precision.state", other_than("fp32"), "SGD.momentum", these(0),
              "it keeps no states", "leave it out")
    yield Row("Precision.state", other_than("fp32"), OPTIMIZER, other_kinds(*STREAMED, "LAMB"),
              "its states are in fp32", "use Adam, AdamW, Lion, Adagrad, SGD with momentum or LAMB, or leave it out")
    yield Row("Precision.master", other_than("fp32"), OPTIMIZER, other_kinds(*ADAMS),
              "it updates an fp32 copy", "use Adam or AdamW, or leave it out")
    for kind in ("optimizer", "params", "grads"):
        for which, reason in (
            (kinds(*NORMS), "its step needs norms of whole tensors, and a disk is streamed once"),
            (kinds("Muon"), "its step needs whole matrices, where a disk is streamed in chunks"),
            (kinds("OneBitAdam", "ZeroOneAdam"), "its states travel between the ranks"),
            (other_kinds(*STREAMED), "its step is torch's own code, which wants its states in memory"),
        ):
            yield Row(f"Config.offload.{kind}.kind", these("nvme"), OPTIMIZER, which, reason, f"{_USE_STREAMED}, or leave it at 'device'")
    yield Row("Config.offload.optimizer.kind", these("nvme"), ANOTHER, YES,
              "the file of states was laid out for the first", "go on with the first")


def _of_types() -> Iterator[Row]:
    yield Row("Precision.param", other_than("fp16"), TRAINED_DTYPE, these("float16"),
              "float16 needs a loss scale", "pass Config(precision='fp16') and call optimizer.backward(loss), or pass Config(precision='bf16')")
    for option, values in (
        ("Precision.reduce", GIVEN),
        ("Precision.state", other_than("fp32")),
        ("Config.comm.params", other_than("exact")),
        ("Config.comm.grads", other_than("exact")),
        ("Config.offload.delayed_update", GIVEN),
        *((f"Config.offload.{kind}.kind", these("nvme")) for kind in ("params", "grads", "optimizer")),
    ):
        yield Row(option, values, TRAINED_DTYPE, these("float64"),
                  "float64 is reduced, stepped and kept as it is, in memory", "leave it out, freeze the parameter, or convert the model to float32")
    yield Row(OPTIMIZER, kinds("Lion", *TALKING), TRAINED_DTYPE, these("float64"),
              "its arithmetic is in fp32", "use AdamW, Adam or torch's element-wise optimizers, or convert the model to float32")
    yield Row(UNFREEZING, YES, TRAINED_DTYPE, other_than(*_TRAINED),
              "it is not a type that is trained", "convert the parameter before prepare")


def _of_hosts() -> Iterator[Row]:
    shared = "the ranks of a host share what they read"
    for option, values in (("Config.offload.params.kind", these("nvme")), ("Precision.stored", GIVEN)):
        yield Row(
            "Config.host_copy", these("off"), option, values, shared, "leave it at 'auto'", {"ranks": MORE_THAN_ONE}
        )
    yield Row("Config.comm.gather", these("copy"), "hosts", MORE_THAN_ONE,
              "GPUs of different hosts cannot map each other's memory", "use 'nccl', or leave it at 'auto'")
    shard = "Config.comm.secondary_shard"
    yield Row(shard, these("host"), "ranks of a host", SEVERAL_COUNTS,
              "each rank keeps an equal part of its host's copy", "start as many ranks on every host, or leave it at 0")
    yield Row(shard, these("host"), "Config.offload.params.kind", these("nvme"),
              "it is a second copy of the parameters in every host's memory, which parameters on NVMe do without",
              "leave it at 0, or keep the parameters in memory", {"hosts": MORE_THAN_ONE})
    yield Row(shard, these("host"), "Precision.stored", GIVEN,
              "each host has a whole copy of quantised weights anyway", "leave it at 0", {"hosts": MORE_THAN_ONE})


def _of_experts() -> Iterator[Row]:
    slices = "Experts.slices"
    yield Row(slices, MORE_THAN_ONE, OPTIMIZER, kinds("Muon"),
              "its step needs whole matrices", "use AdamW or another element-wise optimizer, or slices=1")
    for option, values in (
        ("Precision.stored", GIVEN),
        *((f"Config.offload.{kind}.kind", these("nvme")) for kind in ("params", "grads", "optimizer")),
        ("Config.offload.delayed_update", GIVEN),
        ("Config.step_in_backward", YES),
    ):
        yield Row(slices, MORE_THAN_ONE, option, values, "sliced experts live and are stepped in memory, between two passes", "use slices=1")
    yield Row("Config.comm.tokens", other_than("exact"), "Config.experts", these(None),
              "tokens travel between ranks with different experts only", "leave it at 'exact', or set Config.experts")
    yield Row("Config.experts", GIVEN, IN_STAGE, MORE_THAN_ONE,
              "tokens go to experts on all ranks of the job, or of a stage of its pipeline",
              "name the ranks that hold the same tokens, Experts(shared_by=mesh['tp']), or leave it at None", {"Experts.shared_by": these(None)})


def _of_calls() -> Iterator[Row]:
    """Functions that are called later on: unfreezing, clipping, moving the states away."""
    yield Row("Precision.stored", GIVEN, UNFREEZING, YES,
              "this model's weights are kept in few bits for inference", "prepare it without Precision(stored=)")
    yield Row(FROZEN_MODEL, YES, UNFREEZING, YES,
              "nothing in it is made to be trained", _BEFORE)
    for kind in ("params", "grads", "optimizer"):
        yield Row(f"Config.offload.{kind}.kind", these("nvme"), UNFREEZING, YES, "files are laid out in prepare", _BEFORE)
    for option, values in (("Config.offload.delayed_update", GIVEN), ("Config.step_in_backward", YES)):
        yield Row(option, values, UNFREEZING, YES, "the units of the step are laid out in prepare", _BEFORE)
    yield Row(OPTIMIZER, kinds(*ONE_BIT), UNFREEZING, YES, "its states are laid out in prepare", _BEFORE)
    yield Row("optimizer.add_param_group()", YES, OPTIMIZER, kinds(*ONE_BIT),
              "its states are laid out when the model is prepared", "give it all parameters before, and freeze them after")
    yield Row("clip_grad_norm_()", YES, "Config.clip", GIVEN,
              "Config(clip=...) clips in every step already", "use one of them")
    for call in ("clip_grad_norm_()", "clip_grad_value_()"):
        yield Row(call, YES, "Config.step_in_backward", YES,
                  "the step takes the gradients, and they are gone when the backward ends", "leave out one of the two")
    yield Row("clip_grad_norm_.norm_type", other_than(2.0), OPTIMIZER, kinds(*ONE_BIT),
              "what it compresses is measured by its 2-norm alone", "use 2.0")
    call = "offload_states()"
    yield Row(
        call,
        YES,
        "Config.offload.delayed_update",
        GIVEN,
        "an update may be under way beside the pass",
        "leave one of the two out",
    )
    yield Row(call, YES, OPTIMIZER, kinds(*TALKING),
              "its states have buffers of their own", "use AdamW, Adam or torch's own optimizers, or leave the states in memory")
    yield Row("offload_states.path", GIVEN, "offload_states.to", other_than("nvme"),
              "only files have a path", "leave the path out")


def _of_deepspeed() -> Iterator[Row]:
    """Keys of DeepSpeed's file whose rule is not that of the field that they become."""
    zero = "zero_optimization"
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        yield Row(
            f"{zero}.{key}", YES, f"{zero}.stage", these(0, 1, 2), "ZeRO++ is for stage 3", "use false, or stage 3"
        )
    yield Row(f"{zero}.zero_hpz_partition_size", other_than("auto", 1), f"{zero}.stage", these(0, 1, 2),
              "ZeRO++ is for stage 3", "use 1, or stage 3")
    for option, others in (
        ("fp16.enabled", ("bf16.enabled", "bfloat16.enabled")),
        ("torch_autocast.enabled", ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")),
    ):
        for other in others:
            yield Row(
                option, YES, other, YES, "each of the two chooses the type of the computation", "switch one of them off"
            )
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        yield Row(f"{zero}.{old}", YES, f"{zero}.{new}", GIVEN, f"{new} takes its place", f"remove {old}")


def _of_trainer() -> Iterator[Row]:
    """Arguments of Hugging Face's Trainer."""
    for low in _LOW:
        yield Row(f"--{low}_full_eval", YES, "--zeropp", YES,
                  "it would convert whole parameters after they were partitioned",
                  f"give --{low} and precision {low!r} in the configuration, with which the model is held, and evaluated, in that type")
    for name in ("deepspeed", "fsdp"):
        yield Row(f"--{name}", YES, "--zeropp", YES, "each of the two partitions the model", "give one of the two")
    yield Row("--auto_find_batch_size", YES, "--zeropp", YES,
              "it starts again with a model that is partitioned already", "give --per_device_train_batch_size")
    for low in _LOW:
        yield Row("Config.precision", these(low), f"--{low}", these(False),
                  "the Trainer takes the type from its arguments", f"give --{low}")
        yield Row(f"--{low}", YES, "Config.precision", other_than(None, low),
                  "each of the two chooses the type of the computation", "give one type")

# fmt: on

TABLE: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("Types", tuple(_of_precision())),
    ("Stages", tuple(_of_stages())),
    ("Files and the wire", tuple(_of_files())),
    ("Kinds of step", tuple(_of_steps())),
    ("Ranks of a job", tuple(_of_jobs())),
    ("Optimizers", tuple(_of_optimizers())),
    ("Types of the model", tuple(_of_types())),
    ("Ranks and hosts", tuple(_of_hosts())),
    ("Experts", tuple(_of_experts())),
    ("Calls after prepare", tuple(_of_calls())),
    ("DeepSpeed's file", tuple(_of_deepspeed())),
    ("Trainer's arguments", tuple(_of_trainer())),
)
"""Rows under their headings. The first row that holds is the one that a message names."""
ROWS: tuple[Row, ...] = tuple(row for _, rows in TABLE for row in rows)


def clash(facts: Facts, only: Iterable[str] | None = None) -> str:
    """Return the message of the first row that holds; empty where everything combines.

    Args:
        only: the options to look at; None: all of them.
    """
    chosen = None if only is None else set(only)
    for row in ROWS:
        if (chosen is None or row.option in chosen) and _holds(row, facts):
            return _message(row, facts)
    return ""


def check(facts: Facts, only: Iterable[str] | None = None) -> None:
    """Raise zeropp.ConfigError with the first row that holds; arguments as of :func:`clash`."""
    said = clash(facts, only)
    if said:
        raise ConfigError(said)


def _holds(row: Row, facts: Facts) -> bool:
    asked = ((row.option, row.values), (row.other, row.others), *row.where.items())
    return all(option in facts and values.holds(_plain(facts[option])) for option, values in asked)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Named) else value


def _message(row: Row, facts: Facts) -> str:
    seen = facts[row.option]
    subject = seen.words if isinstance(seen, Named) else f"{row.option}: {shown(seen)}"
    others = " and ".join(_seen(option, facts[option]) for option in (row.other, *row.where))
    return f"{subject} does not combine with {others}: {row.reason}; {row.way_out}"


def _seen(option: str, value: Any) -> str:
    return value.words if isinstance(value, Named) else f"{option}={shown(value)}"


def markdown() -> str:
    """Return the table of docs/compatibility.md."""
    lines = []
    for heading, rows in TABLE:
        lines += [f"## {heading}", "", "| option | does not combine with | reason | way out |", "|---|---|---|---|"]
        for row in rows:
            others = [(row.other, row.others), *row.where.items()]
            cells = (
                _cell(row.option, row.values),
                ", where ".join(_cell(*one) for one in others),
                row.reason,
                row.way_out,
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(option: str, values: Values) -> str:
    return f"`{option}`" if values is YES else f"`{option}` {values.words}"
