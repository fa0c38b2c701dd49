"""`PARENT MODULE ARGUMENT …`: the module, as `python -m` runs it, that ends when process PARENT, which started it, has.

Run by its path, with `python -P`: this folder is no place to import from. It polls, since what Linux offers instead
(PR_SET_PDEATHSIG) is sent when the thread ends that started the process, and macOS has nothing alike.
"""

import os
import runpy
import signal
import sys
import threading
import time

_GRACE = 10.0  # seconds for a usual end


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_follow, args=(int(sys.argv[1]),), daemon=True).start()
    del sys.argv[:2]  # the module takes its own name as the first
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
