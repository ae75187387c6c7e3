"""Mount an NFS export through FUSE, in user space: for kernels that have no NFS client.

    python nfs_client.py nfs://HOST/EXPORT MOUNTPOINT

libnfs speaks to the server. As with an NFS client of its own, the kernel keeps attributes and names, also
names that are not there, for some seconds without asking the server again, and drops a file's pages when the
file is opened. Needs the library libnfs 4, FUSE and the package `mfusepy`.
"""

import argparse
import ctypes
import errno
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_uint64, c_void_p

import mfusepy

NFS3ERR_STALE = 70
STAT = ("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks")
SHOWN = ("ino", "mode", "nlink", "uid", "gid", "size", "blocks")
TIMES = ("atime", "mtime", "ctime")
TIMES_NSEC = tuple(f"{name}_nsec" for name in TIMES)


class Stat(ctypes.Structure):
    """libnfs' `nfs_stat_64`."""

    _fields_ = [(name, c_uint64) for name in (*STAT, *TIMES, *TIMES_NSEC, "used")]

    def entries(self) -> dict[str, float]:
        """As FUSE takes them."""
        found = {f"st_{name}": getattr(self, name) for name in SHOWN}
        times = {f"st_{name}": getattr(self, name) + getattr(self, f"{name}_nsec") / 1e9 for name in TIMES}
        return found | times


class Entry(ctypes.Structure):
    """The part of libnfs' `nfsdirent` that is read."""


Entry._fields_ = [("next", POINTER(Entry)), ("name", c_char_p), ("ino", c_uint64)]


class NFS(mfusepy.Operations):
    """One connection to a server; its calls come one at a time, because libnfs 4 is not for threads."""

    use_ns = False

    def __init__(self, url: str) -> None:
        self.library = ctypes.CDLL("libnfs.so.13")
        for name in ("nfs_init_context", "nfs_parse_url_dir", "nfs_get_error", "nfs_readdir"):
            getattr(self.library, name).restype = c_void_p
        self.library.nfs_get_error.restype = c_char_p
        self.library.nfs_readdir.restype = POINTER(Entry)
        self.url, self.context = url, None

    def init(self, path: str) -> None:
        """Connect; in the process that serves the mount."""
        self.context = c_void_p(self.library.nfs_init_context())
        server, _, rest = self.url.removeprefix("nfs://").partition("/")
        options = rest.partition("?")[2]
        parsed = c_void_p(self.library.nfs_parse_url_dir(self.context, f"nfs://{server}/?{options}".encode()))
        assert parsed, self.library.nfs_get_error(self.context)
        self._call("mount", server.encode(), f"/{rest.partition('?')[0]}".encode())

    def _call(self, name: str, *arguments: object) -> int:
        result = getattr(self.library, f"nfs_{name}")(self.context, *arguments)
        if result == -errno.EFAULT:
            # Of reads and writes, libnfs 4 gives the server's status only as its message's last character.
            status = self.library.nfs_get_error(self.context).rstrip(b'"')[-1]
            result = -(errno.ESTALE if status == NFS3ERR_STALE else status)
        if result < 0:
            raise mfusepy.FuseOSError(-result)
        return result

    def getattr(self, path: str, fi: mfusepy.fuse_file_info | None = None) -> dict[str, float]:
        found = Stat()
        if fi is not None and fi.fh:
            self._call("fstat64", c_void_p(fi.fh), byref(found))
        else:
            self._call("lstat64", os.fsencode(path), byref(found))
        return found.entries()

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        folder = c_void_p()
        self._call("opendir", os.fsencode(path), byref(folder))
        found = []
        while entry := self.library.nfs_readdir(self.context, folder):
            found.append((os.fsdecode(entry.contents.name), {"st_ino": entry.contents.ino}, 0))
        self.library.nfs_closedir(self.context, folder)
        return found

    def open(self, path: str, fi: mfusepy.fuse_file_info) -> int:
        return self.create(path, 0, fi)

    def create(self, path: str, mode: int, fi: mfusepy.fuse_file_info) -> int:
        file = c_void_p()
        self._call("open2", os.fsencode(path), c_int(fi.flags), c_int(mode), byref(file))
        fi.fh = file.value
        return 0

    def release(self, path: str, fi: mfusepy.fuse_file_info) -> int:
        return self._call("close", c_void_p(fi.fh))

    def read(self, path: str, size: int, offset: int, fi: mfusepy.fuse_file_info) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        count = self._call("pread", c_void_p(fi.fh), c_uint64(offset), c_uint64(size), buffer)
        return buffer.raw[:count]

    def write(self, path: str, data: bytes, offset: int, fi: mfusepy.fuse_file_info) -> int:
        return self._call("pwrite", c_void_p(fi.fh), c_uint64(offset), c_uint64(len(data)), data)

    def fsync(self, path: str, datasync: int, fi: mfusepy.fuse_file_info) -> int:
        return self._call("fsync", c_void_p(fi.fh))

    def truncate(self, path: str, length: int, fi: mfusepy.fuse_file_info | None = None) -> int:
        return self._call("truncate", os.fsencode(path), c_uint64(length))

    def mkdir(self, path: str, mode: int) -> int:
        return self._call("mkdir2", os.fsencode(path), c_int(mode))

    def rmdir(self, path: str) -> int:
        return self._call("rmdir", os.fsencode(path))

    def unlink(self, path: str) -> int:
        return self._call("unlink", os.fsencode(path))

    def rename(self, old: str, new: str) -> int:
        return self._call("rename", os.fsencode(old), os.fsencode(new))

    def chmod(self, path: str, mode: int) -> int:
        return self._call("chmod", os.fsencode(path), c_int(mode))

    def utimens(self, path: str, times: object = None) -> int:
        return 0


def main() -> None:
    """Mount and serve until it is unmounted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("mountpoint")
    parser.add_argument("--cache", type=float, default=3.0, help="seconds for attributes and names")
    parser.add_argument("--read-only", action="store_true")
    args = parser.parse_args()
    kept = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), args.cache)
    options = dict(foreground=True, nothreads=True, raw_fi=True, use_ino=True, ro=args.read_only)
    mfusepy.FUSE(NFS(args.url), args.mountpoint, fsname="nfs", **options, **kept)


if __name__ == "__main__":
    main()
