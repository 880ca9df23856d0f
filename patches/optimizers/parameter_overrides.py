"""Where an optimizer of bitsandbytes looks for the configuration that one of its parameters has for itself."""

from __future__ import annotations

from ..engine import Rewrite

BY_PARAMETER = Rewrite(
    "bitsandbytes.optim.optimizer:Optimizer8bit.get_config",
    "return config",
    'config.update(self.mng.pid2config.get(id(self.param_groups[gindex]["params"][pindex]), {}))\nreturn config',
    when="bitsandbytes<0.50",
)
"""An override of the parameter counts, not only one of its position, as since 0.50 (#1269)."""
