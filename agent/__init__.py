"""The program: its commands and settings, and the code that connects all other packages."""

import signal
import sys


def main() -> None:
    """Start the command line. Until its modules are imported, Ctrl-C ends the process without a
    traceback. A reload that the daemon is asked for during its start waits until it can."""
    if sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kneewatch.agent.cli import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
