"""What a file system that is not here says of itself."""

from collections import namedtuple

GIB = 1 << 30


def volume(*, free, size=100 * GIB, files=1000, free_files=100_000, flags=0):
    """The answer of `os.statvfs`; sizes in bytes."""
    Volume = namedtuple("Volume", "f_bavail f_frsize f_blocks f_files f_favail f_flag")
    return Volume(free // 512, 512, size // 512, files, free_files, flags)
