/* A disk that fails: loaded before libc (LD_PRELOAD), it changes what happens to files below one folder.

   Nothing changes until set_fault is called. After so many more bytes have been written there, writes
     1 full       end in ENOSPC, the first of them half-way
     2 read-only  end in EROFS, and so do opening for writing, renaming and deleting
     3 slow       take 20 ms each, from the start, and so does fsync
     4 zeros      succeed, and leave zeros in the file
     5 gone       end in EIO, and so does everything else
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int kind = 0;
static long left = 0;
static char folder[4096];

void set_fault(int which, long bytes, const char *where) {
    strncpy(folder, where, sizeof folder - 1);
    left = bytes;
    kind = which;
}

long bytes_left(void) { return left; }

static int below(const char *path) { return kind && strncmp(path, folder, strlen(folder)) == 0; }

static int ours(int fd) {
    char link[64], path[4096];
    if (!kind) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int refused(void) {
    if (left > 0 || (kind != 2 && kind != 5)) return 0;
    errno = kind == 2 ? EROFS : EIO;
    return 1;
}

ssize_t write(int fd, const void *data, size_t count) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "write");
    if (!ours(fd)) return next(fd, data, count);
    if (kind == 3) usleep(20000);
    if (refused()) return -1;
    if (kind == 1 && left < (long)count) {
        size_t part = left > 0 ? (size_t)left : 0;
        left = 0;
        if (part) return next(fd, data, part);
        errno = ENOSPC;
        return -1;
    }
    left -= count;
    if (kind == 4 && left < 0) {
        void *zeros = calloc(1, count);
        ssize_t written = next(fd, zeros, count);
        free(zeros);
        return written;
    }
    return next(fd, data, count);
}

int fsync(int fd) {
    static int (*next)(int);
    if (!next) next = dlsym(RTLD_NEXT, "fsync");
    if (ours(fd)) {
        if (kind == 3) usleep(20000);
        if (kind == 5 && refused()) return -1;
    }
    return next(fd);
}

int rename(const char *from, const char *to) {
    static int (*next)(const char *, const char *);
    if (!next) next = dlsym(RTLD_NEXT, "rename");
    return below(from) && refused() ? -1 : next(from, to);
}

int unlink(const char *path) {
    static int (*next)(const char *);
    if (!next) next = dlsym(RTLD_NEXT, "unlink");
    return below(path) && refused() ? -1 : next(path);
}

static int opens(const char *name, const char *path, int flags, mode_t mode) {
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    if (below(path) && (writes || kind == 5) && refused()) return -1;
    return next(path, flags, mode);
}

#define OPEN(name)                                         \
    int name(const char *path, int flags, ...) {           \
        va_list rest;                                      \
        va_start(rest, flags);                             \
        mode_t mode = flags & O_CREAT ? va_arg(rest, int) : 0; \
        va_end(rest);                                      \
        return opens(#name, path, flags, mode);            \
    }
OPEN(open)
OPEN(open64)
