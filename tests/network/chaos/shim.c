/* Preloaded into a process of a campaign: its wall clock is off by CHAOS_CLOCK_S seconds (a number, or a file that holds
 * one and may change), and once `chaos_arm` has been called, what it writes below a folder ends at an offset: by
 * SIGKILL, or since the disk is full from there on. Offsets count bytes, and COST for each other change to the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
enum { COST = 4096 };
enum { COUNT, KILL, FULL };

static double offset_s(void) {
    static const char *text;
    if (!text) text = getenv("CHAOS_CLOCK_S") ? getenv("CHAOS_CLOCK_S") : "0";
    if (*text != '/') return atof(text);
    static __typeof__(open) *real_open;
    static __typeof__(read) *real_read;
    if (!real_open) real_open = REAL(open), real_read = REAL(read);
    char content[32] = "0";
    int descriptor = real_open(text, O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
        if (real_read(descriptor, content, sizeof content - 1) < 0) content[0] = '0';
        close(descriptor);
    }
    return atof(content);
}

static void shift(struct timespec *now) {
    double off = offset_s();
    now->tv_sec += (time_t)off;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static __typeof__(clock_gettime) *real;
    if (!real) real = REAL(clock_gettime);
    int code = real(id, now);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) shift(now);
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return code;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static char folder[4096];
static long long seen, limit;
static int mode;

void chaos_arm(const char *path, long long at, int how) {
    strncpy(folder, path, sizeof folder - 1);
    seen = 0, limit = at, mode = how;
}

long long chaos_seen(void) { return seen; }

static int below(const char *path) { return folder[0] && path && !strncmp(path, folder, strlen(folder)); }

static int inside(int descriptor) {
    char name[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

/* How much of `size` may still be done. */
static long long granted(long long size) {
    long long before = seen;
    seen += size;
    if (mode == COUNT || seen <= limit) return size;
    return before < limit ? limit - before : 0;
}

/* One change of `COST`: 0 if it is to be refused. */
static int allowed(int needs_space) {
    int first = seen <= limit;
    if (granted(COST) == COST) return 1;
    if (mode == KILL) raise(SIGKILL);
    return !(first || needs_space);
}

#define REFUSE return errno = ENOSPC, -1
#define WRITE(name, arguments, call)                                    \
    {                                                                   \
        static __typeof__(name) *real;                                  \
        if (!real) real = REAL(name);                                   \
        if (!inside(descriptor)) { call; }                              \
        size_t asked = size;                                            \
        size = (size_t)granted((long long)size);                        \
        if (size == asked) { call; }                                    \
        if (mode == KILL) {                                             \
            if (size && real arguments < 0) return -1;                  \
            raise(SIGKILL);                                             \
        }                                                               \
        if (!size) REFUSE;                                              \
        call;                                                           \
    }

ssize_t write(int descriptor, const void *data, size_t size)
WRITE(write, (descriptor, data, size), return real(descriptor, data, size))

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t place)
WRITE(pwrite, (descriptor, data, size, place), return real(descriptor, data, size, place))

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t place)
WRITE(pwrite64, (descriptor, data, size, place), return real(descriptor, data, size, place))

#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...) {                                       \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode_t bits = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                      \
        va_end(rest);                                                                  \
        if (flags & O_CREAT && below(path) && !allowed(1)) REFUSE;                     \
        return REAL(name)(path, flags, bits);                                          \
    }
OPEN(open)
OPEN(open64)

#define CHANGE(name, declared, given, concerned, needs_space)                          \
    int name declared {                                                                \
        if ((concerned) && !allowed(needs_space)) REFUSE;                                \
        return REAL(name) given;                                                       \
    }
CHANGE(mkdir, (const char *path, mode_t bits), (path, bits), below(path), 1)
CHANGE(rename, (const char *from, const char *to), (from, to), below(to), 0)
CHANGE(link, (const char *from, const char *to), (from, to), below(to), 1)
CHANGE(linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), below(to), 1)
CHANGE(fsync, (int descriptor), (descriptor), inside(descriptor), 0)

/* Giving space back never fails for want of it. */
#define REMOVE(name, declared, given, concerned)                                       \
    int name declared {                                                                \
        if ((concerned) && mode == KILL && granted(COST) < COST) raise(SIGKILL);         \
        return REAL(name) given;                                                       \
    }
REMOVE(unlink, (const char *path), (path), below(path))
REMOVE(rmdir, (const char *path), (path), below(path))
REMOVE(unlinkat, (int at, const char *path, int flags), (at, path, flags), below(path) || inside(at))
