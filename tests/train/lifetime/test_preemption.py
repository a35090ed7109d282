"""Which reason is told when several signals ask for one stop; what whole jobs do is in test_signals.py."""

import subprocess
import sys

# Signals that wait for the process are delivered together: Linux then runs the handlers of the later ones first.
PROGRAM = """
import itertools, os, signal, time
from longspec.train.preemption import Stop
for numbers in itertools.permutations([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]):
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # before the thread that takes them is born, which inherits it
    stop = Stop(60)
    for number in numbers:
        os.kill(os.getpid(), number)
    assert not stop.agreed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    deadline = time.monotonic() + 10
    while not (stop.agreed() and stop.reason == "signal SIGINT") and time.monotonic() < deadline:
        time.sleep(0.01)
    print(stop.reason)
"""


def test_what_a_person_asked_for_is_told_before_what_launchers_made_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["signal SIGINT"] * 6
