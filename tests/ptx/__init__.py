# SPDX-License-Identifier: Apache-2.0
"""A machine that runs PTX, and a model of how long a GPU would take."""

from ptx.machine import Module
from ptx.memory import Buffer, Defect, Virtual

__all__ = ["Buffer", "Defect", "Module", "Virtual"]
