"""The program: its commands and settings, and the code that connects all other packages."""

import signal


def main() -> None:
    """Start the command line. Until its modules are imported, Ctrl-C ends the process without a
    traceback."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kneewatch.agent.cli import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
