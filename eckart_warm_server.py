"""The first import of the warm server (flows/engine/stage_processes.py): it turns off garbage collection.

Collections take a quarter of the time of the server's imports, and find nothing to free. Each stage turns collection on
again. This file stands outside the packages, because the server must not import any of them: it would keep the version
of its first workspace.
"""

import gc

gc.disable()
