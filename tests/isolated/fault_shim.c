/* LD_PRELOAD library of tests: while armed, the n-th system call of the arming thread fails without doing its work.
 *
 * Only what the library calls for its memory counts: mmap of an fd, munmap and madvise of such a mapping, memfd_create and
 * getrandom by number, and ftruncate, fcntl, fstat, posix_fallocate, open, unlink, close. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

/* Not from sys/mman.h, sys/stat.h and fcntl.h: they declare what is defined here with other types. */
#define MAP_FAILED ((void *)-1)
#define O_TMPFILE_BIT 020000000

#define MAPPED_MAX 256
#define CALLS_MAX 64

static _Thread_local int32_t is_armed, seen, fail_at, fail_errno;
static _Thread_local const char *names[CALLS_MAX];
static _Thread_local int32_t details[CALLS_MAX];
static void *mapped[MAPPED_MAX];
static int32_t no_tmpfile;
static _Atomic int32_t is_holding, is_held;

/* Count from now on; call number n (from 1) fails with errno_value; 0: none fails. */
void arm(int32_t n, int32_t errno_value)
{
    seen = 0;
    fail_at = n;
    fail_errno = errno_value;
    is_armed = 1;
}

/* Stop; return how many calls came. */
int32_t disarm(void)
{
    is_armed = 0;
    return seen;
}

/* munmap of such a mapping takes until this is 0 again; munmap_is_held() tells when one has begun. */
void hold_munmap(int32_t on)
{
    atomic_store(&is_held, 0);
    atomic_store(&is_holding, on);
}

int32_t munmap_is_held(void) { return atomic_load(&is_held); }

/* open() with O_TMPFILE answers EOPNOTSUPP, and is not counted. */
void refuse_tmpfile(int32_t on) { no_tmpfile = on; }

/* The name of call number n since arm(), and an fcntl's command. */
const char *call_name(int32_t n) { return n >= 1 && n <= seen && n <= CALLS_MAX ? names[n - 1] : ""; }
int32_t call_detail(int32_t n) { return n >= 1 && n <= seen && n <= CALLS_MAX ? details[n - 1] : -1; }

static int32_t fails(const char *name, int32_t detail)
{
    if (!is_armed)
        return 0;
    if (seen < CALLS_MAX) {
        names[seen] = name;
        details[seen] = detail;
    }
    if (++seen != fail_at)
        return 0;
    errno = fail_errno;
    return 1;
}

#define REAL(name, type)                   \
    static type real;                      \
    if (!real)                             \
    *(void **)&real = dlsym(RTLD_NEXT, name)

static int32_t find(const void *address)
{
    int32_t i;
    for (i = 0; i < MAPPED_MAX; i++)
        if (mapped[i] == address)
            return i;
    return -1;
}

typedef long (*syscall_function)(long, long, long, long, long, long, long);
typedef int (*ftruncate_function)(int, int64_t);
typedef int (*fcntl_function)(int, int, void *);
typedef int (*fstat_function)(int, void *);
typedef int (*fxstat_function)(int, int, void *);
typedef void *(*mmap_function)(void *, size_t, int, int, int, int64_t);
typedef int (*munmap_function)(void *, size_t);
typedef int (*madvise_function)(void *, size_t, int);
typedef int (*close_function)(int);
typedef int (*open_function)(const char *, int, unsigned);
typedef int (*unlink_function)(const char *);
typedef int (*fallocate_function)(int, int64_t, int64_t);

long syscall(long number, ...)
{
    long a[6];
    int i;
    va_list list;
    REAL("syscall", syscall_function);
    va_start(list, number);
    for (i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_memfd_create && fails("memfd_create", 0))
        return -1;
    if (number == SYS_getrandom && fails("getrandom", 0))
        return -1;
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Each name twice: with the suffix 64 it is the one that a program built for large files calls. */
#define BOTH(define) define(, ) define(64, )

#define FTRUNCATE(suffix, _)                                     \
    int ftruncate##suffix(int fd, int64_t nbytes)                \
    {                                                            \
        REAL("ftruncate" #suffix, ftruncate_function);           \
        return fails("ftruncate", 0) ? -1 : real(fd, nbytes);    \
    }
#define FCNTL(suffix, _)                                         \
    int fcntl##suffix(int fd, int command, ...)                  \
    {                                                            \
        void *argument;                                          \
        va_list list;                                            \
        REAL("fcntl" #suffix, fcntl_function);                   \
        va_start(list, command);                                 \
        argument = va_arg(list, void *);                         \
        va_end(list);                                            \
        return fails("fcntl", command) ? -1 : real(fd, command, argument); \
    }
#define FSTAT(suffix, _)                                         \
    int fstat##suffix(int fd, void *out)                         \
    {                                                            \
        REAL("fstat" #suffix, fstat_function);                   \
        return fails("fstat", 0) ? -1 : real(fd, out);           \
    }
#define FXSTAT(suffix, _)                                        \
    int __fxstat##suffix(int version, int fd, void *out)         \
    {                                                            \
        REAL("__fxstat" #suffix, fxstat_function);               \
        return fails("fstat", 0) ? -1 : real(version, fd, out);  \
    }
#define MMAP(suffix, _)                                          \
    void *mmap##suffix(void *hint, size_t nbytes, int protection, int flags, int fd, int64_t offset) \
    {                                                            \
        void *address;                                           \
        int32_t i;                                               \
        REAL("mmap" #suffix, mmap_function);                     \
        if (fd >= 0 && fails("mmap", 0))                         \
            return MAP_FAILED;                                   \
        address = real(hint, nbytes, protection, flags, fd, offset); \
        if (fd >= 0 && address != MAP_FAILED && (i = find(NULL)) >= 0) \
            mapped[i] = address;                                 \
        return address;                                          \
    }
#define OPEN(suffix, _)                                          \
    int open##suffix(const char *path, int flags, ...)           \
    {                                                            \
        unsigned mode;                                           \
        va_list list;                                            \
        REAL("open" #suffix, open_function);                     \
        va_start(list, flags);                                   \
        mode = va_arg(list, unsigned);                           \
        va_end(list);                                            \
        if (no_tmpfile && (flags & O_TMPFILE_BIT)) {             \
            errno = EOPNOTSUPP;                                  \
            return -1;                                           \
        }                                                        \
        return fails("open", flags) ? -1 : real(path, flags, mode); \
    }
#define FALLOCATE(suffix, _)                                     \
    int posix_fallocate##suffix(int fd, int64_t offset, int64_t nbytes) \
    {                                                            \
        REAL("posix_fallocate" #suffix, fallocate_function);     \
        return fails("posix_fallocate", 0) ? fail_errno : real(fd, offset, nbytes); \
    }

BOTH(FTRUNCATE)
BOTH(FCNTL)
BOTH(FSTAT)
BOTH(FXSTAT)
BOTH(MMAP)
BOTH(OPEN)
BOTH(FALLOCATE)

int munmap(void *address, size_t nbytes)
{
    int32_t i = find(address);
    REAL("munmap", munmap_function);
    if (i >= 0 && fails("munmap", 0))
        return -1;
    while (i >= 0 && atomic_load(&is_holding)) {
        atomic_store(&is_held, 1);
        (void)sched_yield();
    }
    if (i >= 0)
        mapped[i] = NULL;
    return real(address, nbytes);
}

int madvise(void *address, size_t nbytes, int advice)
{
    REAL("madvise", madvise_function);
    return find(address) >= 0 && fails("madvise", advice) ? -1 : real(address, nbytes, advice);
}

int close(int fd)
{
    REAL("close", close_function);
    /* Linux gives the number back whatever it answers. */
    if (fails("close", 0)) {
        (void)real(fd);
        errno = fail_errno;
        return -1;
    }
    return real(fd);
}

int unlink(const char *path)
{
    REAL("unlink", unlink_function);
    return fails("unlink", 0) ? -1 : real(path);
}
