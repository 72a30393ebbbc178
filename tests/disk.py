"""A place that only fsspec reaches: this machine's disk, which remembers listings as object stores do.

Worker processes know it once they have unpickled the task, whose module this is.
"""

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.tasks import Blobs


class Disk(LocalFileSystem):
    """``disk:///folder``."""

    protocol = "disk"
    remembered = {}

    def ls(self, path, detail=False, **kwargs):
        key = path, detail
        if key not in self.remembered:
            self.remembered[key] = super().ls(path, detail, **kwargs)
        return self.remembered[key]

    def invalidate_cache(self, path=None):
        self.remembered.clear()


class DiskBlobs(Blobs):
    """A task that brings its file system with it."""


fsspec.register_implementation("disk", Disk, clobber=True)
