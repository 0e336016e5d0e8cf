"""What XIDs, the NVIDIA driver's error numbers, mean and ask for. Pure.

Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors),
its immediate action for Ampere and newer GPUs. What a program did to itself (13, 31, 43, 45, 68,
69) is no fault of the GPU and is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

RESET = "reset the GPU"
REBOOT = "reboot the node"
RESTART = "restart the server; the GPU can wait for its next reset"
DRAINED = "reset the GPU once nothing runs on it"
REPLACE = "reset the GPU and have it replaced if it comes back"
LINK = "reset all GPUs of that NVLink fabric; look at cables, bridges and NVSwitches if it returns"


@dataclass(frozen=True, slots=True)
class Xid:
    """One number. `urgent`: work on that GPU is lost or wrong until the action is taken."""

    code: int
    meaning: str
    action: str
    urgent: bool = True


TABLE = (
    Xid(46, "the GPU stopped processing", RESET),
    Xid(48, "an uncorrectable (double bit) memory error", RESET),
    Xid(61, "the GPU's microcontroller hit a breakpoint", RESET),
    Xid(62, "the GPU's microcontroller halted", RESET),
    Xid(63, "a memory row was marked to be remapped", DRAINED, False),
    Xid(64, "a memory row could not be remapped", REPLACE),
    Xid(74, "an NVLink error", LINK),
    Xid(79, "the GPU has fallen off the bus", REBOOT),
    Xid(92, "many single bit memory errors", DRAINED, False),
    Xid(94, "an uncorrectable memory error, contained to one program", RESTART),
    Xid(95, "an uncorrectable memory error, not contained", RESET),
    Xid(109, "the GPU did not switch contexts in time", RESET),
    Xid(110, "a security fault", RESET),
    Xid(119, "the GPU's system processor (GSP) did not answer", RESET),
    Xid(120, "an error of the GPU's system processor (GSP)", RESET),
    Xid(140, "a memory error that could not be recovered", RESET),
    Xid(143, "the GPU could not be initialised", RESET),
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
"""The XIDs that speak of the GPU itself, by number."""

RECOVERY: Mapping[int, str] = MappingProxyType(
    {
        1: RESET,
        2: REBOOT,
        3: "drain the work that reaches other GPUs through it",
        4: "drain it, then reset it",
    }
)
"""What the driver itself asks for: nvmlDeviceGpuRecoveryAction_t of nvml.h; 0 is nothing."""
