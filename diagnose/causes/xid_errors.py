"""NVIDIA's XID errors: what each number means and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

RESET = "reset the GPU"
REBOOT = "reboot the node"
RESTART = "restart the server; the GPU can wait for its next reset"
DRAINED = "reset the GPU once it is drained"
REPLACE = "reset the GPU; replace it if the error returns"
LINK = "reset all GPUs of that NVLink fabric; check cables, bridges and NVSwitches if it returns"


class Xid(Struct, frozen=True):
    """An XID error number, what it means and what to do about it.

    `urgent`: until the action is taken, work on that GPU is lost or its results are wrong. `halts`:
    until then the GPU does nothing at all. So if such a GPU works, the action has been taken and
    the number is old.
    """

    code: int
    meaning: str
    action: str
    urgent: bool = True
    halts: bool = False


TABLE = (
    Xid(46, "the GPU stopped processing", RESET, halts=True),
    Xid(48, "an uncorrectable (double bit) memory error", RESET),
    Xid(61, "the GPU's microcontroller hit a breakpoint", RESET),
    Xid(62, "the GPU's microcontroller halted", RESET, halts=True),
    Xid(63, "a memory row was marked to be remapped", DRAINED, False),
    Xid(64, "a memory row could not be remapped", REPLACE),
    Xid(74, "an NVLink error", LINK),
    Xid(79, "the GPU has fallen off the bus", REBOOT, halts=True),
    Xid(92, "many single bit memory errors", DRAINED, False),
    Xid(94, "an uncorrectable memory error, contained to one program", RESTART),
    Xid(95, "an uncorrectable memory error, not contained", RESET),
    Xid(109, "the GPU did not switch contexts in time", RESET),
    Xid(110, "a security fault", RESET),
    Xid(119, "the GPU's system processor (GSP) did not answer", RESET, halts=True),
    Xid(120, "an error of the GPU's system processor (GSP)", RESET),
    Xid(140, "a memory error that could not be recovered", RESET),
    Xid(143, "the GPU could not be initialised", RESET, halts=True),
    *(
        Xid(code, f"an NVLink error ({unit})", LINK)
        for code, unit in (
            (144, "SAW"),
            (145, "RLW"),
            (146, "TLW"),
            (147, "TREX"),
            (148, "NVLPW"),
            (149, "NETIR"),
            (150, "MSE"),
        )
    ),
)

XIDS: Mapping[int, Xid] = MappingProxyType({xid.code: xid for xid in TABLE})
"""XIDs that are about the GPU itself rather than a program, by number."""

RECOVERY: Mapping[int, str] = MappingProxyType(
    {
        1: RESET,
        2: REBOOT,
        3: "drain peer-to-peer work",
        4: "drain the GPU, then reset it",
    }
)
"""The recovery action that the driver requests; 0 means none.

nvmlDeviceGpuRecoveryAction_t of nvml.h.
"""
