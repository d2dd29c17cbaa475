"""Signals that a process and all that it starts ignore, whatever handlers they ask the kernel for.

To ignore a signal before a program starts is enough for most programs. A program written in Go that wants the signal
for itself (`signal.Notify`) gets it nevertheless; wandb's service does so and ends. A filter of the kernel's (seccomp)
lets such a request succeed without effect. It can go when wandb's service has an option to leave signals alone.
"""

from __future__ import annotations

import ctypes
import platform
import signal
import struct
import sys
from collections.abc import Sequence

# Of Linux, by `uname -m`: AUDIT_ARCH_* from linux/audit.h, and the number of the system call rt_sigaction.
_MACHINES = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
# linux/prctl.h and linux/seccomp.h.
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _SUCCEED_WITHOUT_EFFECT = 0x7FFF0000, 0x00050000
# linux/bpf_common.h: load a word of the call's description, compare, return.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data; of an argument the lower half, on little-endian machines.
_CALL, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24


def ignore_for_good(numbers: Sequence[int]) -> bool:
    """Ignore signals in this process and in every process that it starts from now on.

    Returns:
        whether programs that ask for the signals are kept from them too: on Linux, where the kernel has seccomp.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None or sys.byteorder != "little":
        return False
    instructions = _filter(*machine, [int(number) for number in numbers])
    buffer = ctypes.create_string_buffer(b"".join(instructions))
    program = _Program(len(instructions), ctypes.cast(buffer, ctypes.c_void_p))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Without it only root may set a filter. Programs with the setuid bit lose it; none is started here.
    word = ctypes.c_ulong
    if prctl(_PR_SET_NO_NEW_PRIVS, word(1), word(0), word(0), word(0)) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, word(_SECCOMP_MODE_FILTER), ctypes.byref(program)) == 0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def _filter(machine: int, call: int, numbers: Sequence[int]) -> list[bytes]:
    """The instructions: rt_sigaction(number, action, …) with an action other than null has no effect."""
    # Each step is (code, value, where to go if equal, where to go otherwise); None is the next step.
    allow, skip = 7 + len(numbers), 8 + len(numbers)
    steps: list[tuple[int, int, int | None, int | None]] = [
        (_LOAD, _MACHINE, None, None),
        (_IF_EQUAL, machine, None, allow),
        (_LOAD, _CALL, None, None),
        (_IF_EQUAL, call, None, allow),
        # Null only asks which handler there is.
        (_LOAD, _SECOND, None, None),
        (_IF_EQUAL, 0, allow, None),
        (_LOAD, _FIRST, None, None),
        *((_IF_EQUAL, number, skip, None) for number in numbers),
        (_RETURN, _ALLOW, None, None),
        (_RETURN, _SUCCEED_WITHOUT_EFFECT, None, None),
    ]
    # struct sock_filter; jumps count from the next instruction.
    return [
        struct.pack(
            "=HBBI",
            code,
            0 if equal is None else equal - place - 1,
            0 if otherwise is None else otherwise - place - 1,
            value,
        )
        for place, (code, value, equal, otherwise) in enumerate(steps)
    ]
