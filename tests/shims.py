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
# below the folder FULL_BELOW nothing grows, and no folder is made, while the file FULL_WHILE is there
FULL_DISK = """
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static int full(const char *path) {
    const char *below = getenv("FULL_BELOW"), *flag = getenv("FULL_WHILE");
    if (!below || !flag || strncmp(path, below, strlen(below)) || access(flag, F_OK)) return 0;
    errno = ENOSPC;
    return 1;
}
static int full_file(int file) {
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = file > 2 ? readlink(link, path, PATH_MAX) : -1;
    if (size < 0) return 0;
    path[size] = 0;
    return full(path);
}
ssize_t write(int file, const void *data, size_t size) {
    return full_file(file) ? -1 : syscall(SYS_write, file, data, size);
}
int mkdir(const char *path, mode_t mode) {
    return full(path) ? -1 : (int)syscall(SYS_mkdirat, -100, path, mode);
}
"""
# below the folder SLOW_BELOW, a write and a sync of so many bytes take as long as a disk of SLOW_BYTES_PER_S needs
SLOW_DISK = """
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static void wait_for_disk(int file, size_t size) {
    const char *below = getenv("SLOW_BELOW"), *rate = getenv("SLOW_BYTES_PER_S");
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = below && rate && file > 2 ? readlink(link, path, PATH_MAX) : -1;
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, below, strlen(below))) return;
    double seconds = size / atof(rate);
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}
ssize_t write(int file, const void *data, size_t size) {
    wait_for_disk(file, size);
    return syscall(SYS_write, file, data, size);
}
ssize_t pwrite64(int file, const void *data, size_t size, off_t at) {
    wait_for_disk(file, size);
    return syscall(SYS_pwrite64, file, data, size, at);
}
"""


def preload(folder: Path, source: str, *macros: str) -> dict[str, str]:
    """Compile a shim; -> the environment variable that puts it before the C library."""
    text, library = folder / "shim.c", folder / "shim.so"
    text.write_text(source)
    defines = [f"-D{macro}" for macro in macros]
    subprocess.run(["gcc", "-shared", "-fPIC", *defines, "-o", str(library), str(text)], check=True)
    return {"LD_PRELOAD": str(library)}
