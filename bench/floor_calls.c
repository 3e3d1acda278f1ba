/* The floor of bench_calls.py: the same system calls as the handle API makes, and nothing else; no checks, no handles.
 * `loop` runs each in a loop in C; the others are the least that Python can call: as many arguments as the API's function has,
 * of which the first is used, and the GIL let go. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CALLS 100

static int64_t allocate(int64_t ignored)
{
    struct stat found;
    static unsigned char seed[16];
    static int id_count;
    int fd = (int)syscall(SYS_memfd_create, "kvreuse-bench", 3U);
    (void)ignored;
    ftruncate(fd, 4096);
    fcntl(fd, 1033, 7);
    fstat(fd, &found);
    fcntl(fd, F_GETFL);
    if (!id_count--) {
        syscall(SYS_getrandom, seed, sizeof seed, 0);
        id_count = 63;
    }
    return fd;
}

static int64_t export(int64_t fd) { return fcntl((int)fd, F_DUPFD_CLOEXEC, 0); }

static int64_t import(int64_t fd)
{
    struct stat found;
    int own;
    fstat((int)fd, &found);
    fcntl((int)fd, 1034);
    own = fcntl((int)fd, F_DUPFD_CLOEXEC, 0);
    fstat(own, &found);
    fcntl(own, F_GETFL);
    return own;
}

static int64_t map(int64_t fd)
{
    struct stat found;
    fstat((int)fd, &found);
    return (int64_t)(intptr_t)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
}

static int64_t observe(int64_t fd)
{
    struct stat found;
    fstat((int)fd, &found);
    fcntl((int)fd, F_GETFL);
    fcntl((int)fd, 1034);
    return found.st_size;
}

static int64_t unmap(int64_t address) { return munmap((void *)(intptr_t)address, 4096); }
static int64_t close_fd(int64_t fd) { return close((int)fd); }

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ns a call: allocate, export, import, map, observe, unmap, close, echo. */
static PyObject *loop(PyObject *self, PyObject *ignored)
{
    static int64_t made[CALLS], exported[CALLS], imported[CALLS], mapped[CALLS];
    static volatile int64_t sink;
    double out[8];
    int64_t t;
    int i;
    (void)self;
    (void)ignored;
#define TIME(index, statement)                                                                                         \
    t = now();                                                                                                         \
    for (i = 0; i < CALLS; i++)                                                                                        \
        statement;                                                                                                     \
    out[index] = (double)(now() - t) / CALLS
    TIME(0, made[i] = allocate(i));
    TIME(1, exported[i] = export(made[i]));
    TIME(2, imported[i] = import(exported[i]));
    TIME(3, mapped[i] = map(imported[i]));
    TIME(4, sink = observe(imported[i]));
    TIME(5, sink = unmap(mapped[i]));
    TIME(6, sink = close_fd(imported[i]));
    TIME(7, sink = i);
    for (i = 0; i < CALLS; i++) {
        close((int)exported[i]);
        close((int)made[i]);
    }
    return Py_BuildValue("(dddddddd)", out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]);
}

#define CALLED(function)                                                                                               \
    static PyObject *py_##function(PyObject *self, PyObject *const *arguments, Py_ssize_t count)                      \
    {                                                                                                                  \
        int64_t value = PyLong_AsLongLong(arguments[0]);                                                               \
        (void)self;                                                                                                    \
        (void)count;                                                                                                   \
        Py_BEGIN_ALLOW_THREADS;                                                                                        \
        value = function(value);                                                                                       \
        Py_END_ALLOW_THREADS;                                                                                          \
        return PyLong_FromLongLong(value);                                                                             \
    }
CALLED(allocate)
CALLED(export)
CALLED(import)
CALLED(map)
CALLED(observe)
CALLED(unmap)
CALLED(close_fd)

static PyObject *echo(PyObject *self, PyObject *argument)
{
    (void)self;
    return PyLong_FromLongLong(PyLong_AsLongLong(argument));
}

#define METHOD(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    {"loop", loop, METH_NOARGS, NULL},
    {"echo", echo, METH_O, NULL},
    METHOD("host_allocate", py_allocate),
    METHOD("region_export", py_export),
    METHOD("region_import", py_import),
    METHOD("region_map", py_map),
    METHOD("region_observe", py_observe),
    METHOD("mapping_unmap", py_unmap),
    METHOD("region_close", py_close_fd),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "floor_calls", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_floor_calls(void) { return PyModule_Create(&module); }
