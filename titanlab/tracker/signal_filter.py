"""Signals that a process and its descendants ignore, even if they install handlers.

Most programs keep a signal ignored that was ignored when they started. A Go program that calls `signal.Notify` gets the
signal nevertheless; wandb's service does so and ends. A seccomp filter lets the system call that installs the handler
succeed without effect. The filter can go when wandb's service has an option to ignore signals.
"""

from __future__ import annotations

import ctypes
import platform
import signal
import struct
import sys
from collections.abc import Sequence

# On Linux, by `uname -m`: AUDIT_ARCH_* from linux/audit.h, and the number of the system call rt_sigaction.
_MACHINES = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
# linux/prctl.h and linux/seccomp.h.
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _SUCCEED_WITHOUT_EFFECT = 0x7FFF0000, 0x00050000
# linux/bpf_common.h: load a word of struct seccomp_data, compare, return.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data; an argument's lower half on little-endian machines.
_CALL, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24


def ignore_signals(numbers: Sequence[int]) -> bool:
    """Ignore signals in this process and in every process that it starts from now on.

    Returns:
        whether this includes programs that install handlers: true on Linux if the kernel has seccomp.
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
    # Without NO_NEW_PRIVS only root may set a filter. It disables setuid bits; no setuid program is started here.
    ulong = ctypes.c_ulong
    if prctl(_PR_SET_NO_NEW_PRIVS, ulong(1), ulong(0), ulong(0), ulong(0)) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program)) == 0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def _filter(machine: int, call: int, numbers: Sequence[int]) -> list[bytes]:
    """Instructions with which rt_sigaction(number, action, …) has no effect unless the action is null."""
    # Each step is (code, value, step to go to if equal, step to go to otherwise); None is the next step.
    allow, skip = 7 + len(numbers), 8 + len(numbers)
    steps: list[tuple[int, int, int | None, int | None]] = [
        (_LOAD, _MACHINE, None, None),
        (_IF_EQUAL, machine, None, allow),
        (_LOAD, _CALL, None, None),
        (_IF_EQUAL, call, None, allow),
        # A null action only reads the current handler.
        (_LOAD, _SECOND, None, None),
        (_IF_EQUAL, 0, allow, None),
        (_LOAD, _FIRST, None, None),
        *((_IF_EQUAL, number, skip, None) for number in numbers),
        (_RETURN, _ALLOW, None, None),
        (_RETURN, _SUCCEED_WITHOUT_EFFECT, None, None),
    ]
    # struct sock_filter; jumps are relative to the next instruction.
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
