# SPDX-License-Identifier: Apache-2.0
"""Data efficiency and compressed training in a prepared model: ``Config(efficiency=zeropp.Efficiency(...))``.

Where what stands:

- config/efficiency.py: the dataclasses.
- clock.py: the step, the micro-step and the place in the global batch. All choices are functions of them and of the seed.
- attach.py: the one call of ``prepare``. A technique that acts inside the model is a module here with
  ``check(model, config)``, called before anything is partitioned, and ``attach(model, engine)``, called when all hooks of the engine are
  in place; it has a row in attach.py's table. Both run on all ranks alike. ``engine.clock`` is the model's clock,
  ``engine.config.efficiency`` the configuration.
- zeropp/data: what acts on batches before the model sees them (cutting.py, the curriculum).
"""
