# SPDX-License-Identifier: Apache-2.0
"""Every method of Lightning that zeropp.lightning overrides still exists with its parameters, and the names are registered.

A failure here names the method that moved upstream: read its new source, adapt python/zeropp/lightning/, then the table below.
"""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")
import zeropp.lightning

TRAINER = {
    "_refuse_averages": None, "_evaluated": None, "_pairs": None, "_flush": None,  # ours
    "backward": "self closure_loss optimizer args kwargs",
    "block_backward_sync": "self",
    "lightning_module_state_dict": "self",
    "load_checkpoint": "self checkpoint_path weights_only",
    "load_model_state_dict": "self checkpoint strict",
    "load_optimizer_state_dict": "self checkpoint",
    "model_sharded_context": "self",
    "model_to_device": "self",
    "on_train_end": "self",
    "on_validation_start": "self",
    "optimizer_state": "self optimizer",
    "predict_step": "self args kwargs",
    "register_strategies": "strategy_registry",
    "remove_checkpoint": "self filepath",
    "save_checkpoint": "self checkpoint filepath storage_options",
    "setup": "self trainer",
    "setup_environment": "self",
    "teardown": "self",
    "test_step": "self args kwargs",
    "training_step": "self args kwargs",
    "validation_step": "self args kwargs",
}  # fmt: skip
FABRIC = {
    "backward": "self tensor module args kwargs",
    "clip_gradients_norm": "self module optimizer max_norm norm_type error_if_nonfinite",
    "clip_gradients_value": "self module optimizer clip_val",
    "get_module_state_dict": "self module",
    "get_optimizer_state": "self optimizer",
    "load_checkpoint": "self path state strict weights_only",
    "load_module_state_dict": "self module state_dict strict",
    "module_init_context": "self empty_init",
    "module_to_device": "self module",
    "register_strategies": "strategy_registry",
    "save_checkpoint": "self path state storage_options filter",
    "setup_environment": "self",
    "setup_module": "self module",
    "setup_module_and_optimizers": "self module optimizers scheduler",
    "setup_optimizer": "self optimizer",
}
CASES = [(zeropp.lightning.ZeroppStrategy, name, wanted) for name, wanted in TRAINER.items() if wanted]
CASES += [(zeropp.lightning.ZeroppFabricStrategy, name, wanted) for name, wanted in FABRIC.items()]


@pytest.mark.parametrize(("ours", "name", "wanted"), CASES, ids=[f"{c[0].__name__}.{c[1]}" for c in CASES])
def test_signature(ours, name, wanted):
    (upstream,) = ours.__bases__
    assert " ".join(inspect.signature(getattr(upstream, name)).parameters) == wanted


@pytest.mark.parametrize(
    ("ours", "table"), [(zeropp.lightning.ZeroppStrategy, TRAINER), (zeropp.lightning.ZeroppFabricStrategy, FABRIC)]
)
def test_the_tables_name_everything_that_is_overridden(ours, table):
    own = {n for n, one in vars(ours).items() if inspect.isfunction(one) or isinstance(one, classmethod)}
    assert own - {"__init__"} == set(table)


def test_the_names_are_registered():
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    wanted = {"zeropp", "zeropp_infinity"} | {f"zeropp_stage_{n}{more}" for n in (1, 2, 3) for more in ("", "_offload")}
    assert wanted <= set(StrategyRegistry.available_strategies()) and wanted <= set(
        STRATEGY_REGISTRY.available_strategies()
    )
    assert StrategyRegistry.get("zeropp_stage_2").zeropp_config.stage == 2
    given = zeropp.lightning.ZeroppStrategy(config='{"zero_optimization": {"stage": 1}, "gradient_clipping": 0}')
    assert given.zeropp_config.stage == 1
