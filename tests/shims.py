"""File systems that refuse things, as small libraries for LD_PRELOAD."""

from __future__ import annotations

import subprocess
from pathlib import Path

NO_FLOCK = """
#include <errno.h>
int flock(int file, int how) { (void)file; (void)how; errno = ENOLCK; return -1; }
"""
# CIFS and some FUSE mounts say EINVAL, others ENOTSUP
NO_FOLDER_FSYNC = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int file) {
    struct stat found;
    if (fstat(file, &found) == 0 && S_ISDIR(found.st_mode)) { errno = REASON; return -1; }
    return (int)syscall(SYS_fsync, file);
}
"""


def preload(folder: Path, source: str, *macros: str) -> dict[str, str]:
    """Compile a shim; -> the environment variable that puts it before the C library."""
    text, library = folder / "shim.c", folder / "shim.so"
    text.write_text(source)
    defines = [f"-D{macro}" for macro in macros]
    subprocess.run(["gcc", "-shared", "-fPIC", *defines, "-o", str(library), str(text)], check=True)
    return {"LD_PRELOAD": str(library)}
