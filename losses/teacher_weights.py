"""A teacher's weights as the moving average of a student's.

Operates in place on tensors by name; callers decide when.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from composer_mesh.losses.reductions import Number


@torch.no_grad()
def ema_update(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], rate: Number) -> None:
    """Interpolate each of the teacher's tensors towards the student's, in place.

        teacher <- (1 - rate) teacher + rate student

    `rate` is 1 less a decay: OPSD's `ema_decay` of 0.999 is 0.001 here, and 1 copies. Integers,
    such as counters in buffers, are copied. The average has the teacher's dtype: in half precision
    an update below its resolution is lost, so keep a slow one in float32. Student tensors that the
    teacher lacks are ignored.
    """
    missing = sorted(set(teacher) - set(student))
    if missing:
        raise ValueError(
            f"{len(missing)} of the teacher's {len(teacher)} tensors are not the student's (first:"
            f" {missing[0]}): pass the weights of one architecture under the same names"
        )
    for name, tensor in teacher.items():
        ema_update_tensor(tensor, student[name], rate)


@torch.no_grad()
def ema_update_tensor(teacher: Tensor, student: Tensor, rate: Number) -> None:
    """Apply `ema_update` to one tensor."""
    if not 0 <= rate <= 1:
        raise ValueError(
            f"rate is {rate} but has to be in [0, 1]: 0 keeps the teacher, 1 copies the student"
        )
    if teacher.shape != student.shape:
        raise ValueError(
            f"the teacher's tensor has shape {tuple(teacher.shape)} but the student's"
            f" {tuple(student.shape)}: pass the weights of one architecture"
        )
    if rate == 1 or not teacher.is_floating_point():
        teacher.copy_(student)
    else:
        teacher.lerp_(student.to(teacher), rate)
