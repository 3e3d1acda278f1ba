# cython: language_level=3, binding=True, embedsignature=False
"""The backend in C: thin wrappers over the functions of include/kvreuse.h. Its docs are those of _api.py and the header.

A wrapper has three steps: unpack into C locals, one call without the GIL, check the status. Calls that only read what this process
keeps hold the GIL: letting it go would cost more than they do.
"""

from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_FillInfo, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.ref cimport Py_INCREF
from cython cimport final
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport strlen
from posix.unistd cimport getpid

from kvreuse._capi cimport *

cdef extern from "Python.h":
    object PyType_GenericAlloc(type kind, Py_ssize_t count)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *nbytes) except NULL
    void PyTuple_SET_ITEM(object made, Py_ssize_t i, object item)

cdef extern from *:
    """
    /* The value of an int of at most two digits without a call; 0 if it is another, or this Python keeps them otherwise. */
    #if !defined(Py_LIMITED_API) && PY_VERSION_HEX < 0x030C0000 && PYLONG_BITS_IN_DIGIT == 30
    static inline int kvr_small_int(PyObject *value, int64_t *out)
    {
        const digit *digits = ((PyLongObject *)value)->ob_digit;
        switch (Py_SIZE(value)) {
        case 0: *out = 0; return 1;
        case 1: *out = digits[0]; return 1;
        case -1: *out = -(int64_t)digits[0]; return 1;
        case 2: *out = (int64_t)digits[1] << 30 | digits[0]; return 1;
        default: return 0;
        }
    }
    #elif PY_VERSION_HEX >= 0x030C0000
    static inline int kvr_small_int(PyObject *value, int64_t *out)
    {
        if (!PyUnstable_Long_IsCompact((PyLongObject *)value)) return 0;
        *out = PyUnstable_Long_CompactValue((PyLongObject *)value);
        return 1;
    }
    #else
    static inline int kvr_small_int(PyObject *value, int64_t *out) { (void)value; (void)out; return 0; }
    #endif
    """
    bint kvr_small_int(object value, int64_t *out) noexcept

cdef extern from "internal.h" nogil:
    int32_t kvr_mapping_view(int64_t mapping, int32_t delta, kvr_mapping_info *out) noexcept
    int32_t kvr_mapping_dlpack(int64_t mapping, int32_t device_type, int32_t device_id, int32_t is_versioned, void **out) noexcept
    void kvr_dlpack_delete(void *tensor, int32_t is_versioned) noexcept

from . import _status
from ._api import (
    CopyCounts,
    CudaInfo,
    HandleCounts,
    OperationInfo,
    QueueInfo,
    RestoreResult,
    TableInfo,
    TableLayout,
    TableStats,
)
from ._api import CudaObservation as _CudaObservation
from ._api import HostObservation as _HostObservation
from ._api import MappingInfo as _MappingInfo
from ._api import RegionInfo as _RegionInfo

include "_abi.pxi"

cdef int64_t _owner_pid = getpid()


def _struct_nbytes():
    """Sizes of the header's records as the C compiler saw them: kvreuse._select compares them."""
    return {name: layout["size"] for name, layout in _abi()["structs"].items()}


# ---- what comes in, and errors ----


cdef object _made(const kvr_error *error, str call):
    return _status.make(
        error.status,
        error.detail,
        (error.values[0], error.values[1], error.values[2], error.values[3]),
        error.call.decode() if call is None else call,
        error.native_source,
        error.native_code,
    )


cdef inline int _check(int32_t status, str call=None) except -1:
    """Raise the error of this thread's last call if it failed; `call` names another function than the one that found it."""
    cdef kvr_error error
    if status >= 0:
        return 0
    kvr_error_get(&error)
    raise _made(&error, call)


cdef inline int64_t _int64(object value, str name) except? -1:
    cdef int overflow = 0
    cdef int64_t number
    if type(value) is int:
        if kvr_small_int(value, &number):
            return number
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow:
            return number
    return _status.as_integer(value, name)


cdef inline int64_t _ranged(object value, str name, int64_t low, int64_t high) except? -1:
    cdef int overflow = 0
    cdef int64_t number
    if type(value) is int:
        if not kvr_small_int(value, &number):
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and low <= number <= high:
            return number
    return _status.as_integer(value, name, low, high)


cdef inline int32_t _int32(object value, str name) except? -1:
    return <int32_t>_ranged(value, name, -2147483648, 2147483647)


cdef inline uint32_t _uint32(object value, str name) except? 4294967295:
    return <uint32_t>_ranged(value, name, 0, 4294967295)


cdef inline uint64_t _uint64(object value, str name) except? 18446744073709551615:
    cdef int overflow = 0
    cdef int64_t number
    if type(value) is int:
        if not kvr_small_int(value, &number):
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and number >= 0:
            return <uint64_t>number
    return <uint64_t>_status.as_integer(value, name, 0, 18446744073709551615)


cdef class _Buffer:
    """A buffer of a caller, held while this object lives."""

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, object value, str name, bint writable, bint int64):
        cdef bint good = False
        self.held = False
        try:
            PyObject_GetBuffer(value, &self.view, PyBUF_FULL_RO)
            self.held = True
            good = PyBuffer_IsContiguous(&self.view, b"C") and not (writable and self.view.readonly)
            if good and int64:
                good = (
                    self.view.ndim == 1
                    and self.view.itemsize == 8
                    and self.view.format != NULL
                    and (self.view.format[0] == b"q" or self.view.format[0] == b"l")
                    and self.view.format[1] == 0
                )
        except (TypeError, ValueError, BufferError):
            pass
        if not good:
            kind = "a writable C-contiguous " if writable else "a C-contiguous "
            raise _status.buffer_error(name, value, kind + ("int64 array" if int64 else "bytes buffer"))

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    cdef inline const uint8_t *bytes(self) noexcept:
        return <const uint8_t *>self.view.buf

    cdef inline uint8_t *out_bytes(self) noexcept:
        return <uint8_t *>self.view.buf

    cdef inline const int64_t *int64s(self) noexcept:
        return <const int64_t *>self.view.buf

    cdef inline int64_t *out_int64s(self) noexcept:
        return <int64_t *>self.view.buf

    cdef inline int64_t entries(self) noexcept:
        return self.view.len // 8


cdef inline _Buffer _bytes(object value, str name):
    return _Buffer(value, name, False, False)


cdef inline _Buffer _out_bytes(object value, str name):
    return _Buffer(value, name, True, False)


cdef inline _Buffer _int64s(object value, str name):
    return _Buffer(value, name, False, True)


cdef inline _Buffer _out_int64s(object value, str name):
    return _Buffer(value, name, True, True)


cdef int _check_length(str name, int64_t found, int64_t expected, str unit) except -1:
    if found != expected:
        raise _status.buffer_length_error(name, found, expected, unit)
    return 0


cdef bytes _exact_bytes(object value, str name):
    if type(value) is not bytes:
        raise _status.buffer_error(name, value, "bytes")
    return value


cdef object _text(object value, str name, str want):
    """Give what owns the UTF-8 of a str without NUL: itself, or bytes for a path that is no UTF-8 (PEP 383)."""
    cdef Py_ssize_t nbytes = 0
    cdef const char *text
    cdef object owner = value
    if not isinstance(value, str):
        raise _status.buffer_error(name, value, want)
    try:
        text = PyUnicode_AsUTF8AndSize(value, &nbytes)
    except UnicodeEncodeError:
        owner = value.encode("utf-8", "surrogateescape")
        text = PyBytes_AS_STRING(owner)
        nbytes = PyBytes_GET_SIZE(owner)
    if <Py_ssize_t>strlen(text) != nbytes:
        raise _status.buffer_error(name, value, "str without NUL")
    return owner


cdef inline const char *_chars(object owner) except NULL:
    return PyBytes_AS_STRING(owner) if isinstance(owner, bytes) else PyUnicode_AsUTF8AndSize(owner, NULL)


cdef class _Keys:
    """A batch of keys as given. With an impossible stride the count stays 0: the C call reports it."""

    cdef _Buffer data
    cdef _Buffer sizes
    cdef int64_t stride
    cdef int64_t count
    cdef const uint8_t *keys
    cdef const uint8_t *nbytes

    def __cinit__(self, object keys, object key_stride, object key_nbytes):
        self.data = _bytes(keys, "keys")
        self.stride = _int64(key_stride, "key_stride")
        self.sizes = None if key_nbytes is None else _bytes(key_nbytes, "key_nbytes")
        self.keys = self.data.bytes()
        self.nbytes = NULL
        if self.sizes is not None:
            self.nbytes = self.sizes.bytes()
        self.count = 0

    cdef bint possible(self) except -1:
        """Check the buffers' lengths; False if the stride is impossible."""
        if not 1 <= self.stride <= KVR_KEY_NBYTES:
            return False
        if self.sizes is None:
            self.count = self.data.view.len // self.stride
        else:
            self.count = self.sizes.view.len
        _check_length("keys", self.data.view.len, self.count * self.stride, "bytes")
        return True


cdef object _named(type kind, tuple values):
    """Make a NamedTuple without its Python constructor, which costs more than most system calls here."""
    cdef Py_ssize_t i
    cdef Py_ssize_t count = len(values)
    cdef object made = PyType_GenericAlloc(kind, count)
    for i in range(count):
        item = values[i]
        Py_INCREF(item)
        PyTuple_SET_ITEM(made, i, item)
    return made


# ---- library ----


def abi_version():
    return kvr_abi_version()


def echo(value):
    cdef int64_t out = 0
    kvr_echo(_int64(value, "value"), &out)
    return out


def crc32c(data, value=0):
    cdef _Buffer view = _bytes(data, "data")
    cdef uint32_t start = _uint32(value, "value")
    cdef uint32_t out = 0
    cdef int32_t status
    cdef const uint8_t *address = view.bytes()
    cdef int64_t nbytes = view.view.len
    with nogil:
        status = kvr_crc32c(start, address, nbytes, &out)
    _check(status)
    return out


def handle_counts():
    cdef kvr_handle_counts counts
    kvr_handle_counts_get(&counts)
    return _named(HandleCounts, (counts.regions, counts.mappings, counts.locks, counts.tables, counts.fds))


# ---- regions and mappings ----


cdef class _Record:
    """A record as its C bytes; each field is made when asked for. In all else it is the fallback's named tuple."""

    cdef object named(self):
        raise NotImplementedError

    def __iter__(self):
        return iter(self.named())

    def __len__(self):
        return len(self.named())

    def __getitem__(self, index):
        return self.named()[index]

    def __eq__(self, other):
        return self.named() == ((<_Record>other).named() if isinstance(other, _Record) else other)

    def __hash__(self):
        return hash(self.named())

    def __repr__(self):
        return repr(self.named())


@final
cdef class RegionInfo(_Record):
    cdef kvr_region_info raw

    cdef object named(self):
        return _named(_RegionInfo, (self.raw.handle, self.raw.nbytes, self.raw.physical_nbytes, self.raw.kind, self.raw.access, self.raw.origin, self.raw.mapping_count, self.raw.device, self.raw.inode, self.raw.region_id[:16], self.raw.provider, self.raw.fabric_count))

    @property
    def handle(self):
        return self.raw.handle

    @property
    def nbytes(self):
        return self.raw.nbytes

    @property
    def physical_nbytes(self):
        return self.raw.physical_nbytes

    @property
    def kind(self):
        return self.raw.kind

    @property
    def access(self):
        return self.raw.access

    @property
    def origin(self):
        return self.raw.origin

    @property
    def mapping_count(self):
        return self.raw.mapping_count

    @property
    def device(self):
        return self.raw.device

    @property
    def inode(self):
        return self.raw.inode

    @property
    def region_id(self):
        return self.raw.region_id[:16]

    @property
    def provider(self):
        return self.raw.provider

    @property
    def fabric_count(self):
        return self.raw.fabric_count


@final
cdef class MappingInfo(_Record):
    cdef kvr_mapping_info raw

    cdef object named(self):
        return _named(_MappingInfo, (self.raw.handle, self.raw.region, self.raw.address, self.raw.nbytes, self.raw.access, self.raw.use_count))

    @property
    def handle(self):
        return self.raw.handle

    @property
    def region(self):
        return self.raw.region

    @property
    def address(self):
        return self.raw.address

    @property
    def nbytes(self):
        return self.raw.nbytes

    @property
    def access(self):
        return self.raw.access

    @property
    def use_count(self):
        return self.raw.use_count


@final
cdef class HostObservation(_Record):
    cdef kvr_observation raw

    cdef object named(self):
        return _named(_HostObservation, (self.raw.file_nbytes, self.raw.allocated_nbytes, self.raw.device, self.raw.inode, self.raw.file_mode, self.raw.seals, self.raw.access, self.raw.page_nbytes, self.raw.block_nbytes))

    @property
    def file_nbytes(self):
        return self.raw.file_nbytes

    @property
    def allocated_nbytes(self):
        return self.raw.allocated_nbytes

    @property
    def device(self):
        return self.raw.device

    @property
    def inode(self):
        return self.raw.inode

    @property
    def file_mode(self):
        return self.raw.file_mode

    @property
    def seals(self):
        return self.raw.seals

    @property
    def access(self):
        return self.raw.access

    @property
    def page_nbytes(self):
        return self.raw.page_nbytes

    @property
    def block_nbytes(self):
        return self.raw.block_nbytes


@final
cdef class CudaObservation(_Record):
    cdef kvr_cuda_observation raw

    cdef object named(self):
        return _named(
            _CudaObservation,
            (
                self.raw.handle_types,
                self.raw.allocation_type,
                self.raw.location_type,
                self.raw.location_id,
                self.raw.granularity_min,
                self.raw.granularity_recommended,
                self.raw.mapped_nbytes,
                self.raw.reserved_nbytes,
                self.raw.allowed_handle_types,
                self.raw.access,
                self.raw.mapped_base,
                self.raw.properties_result,
                self.raw.granularity_result,
                self.raw.range_result,
                self.raw.reservation_result,
                self.raw.allowed_result,
                self.raw.access_result,
            ),
        )

    @property
    def handle_types(self):
        return self.raw.handle_types

    @property
    def allocation_type(self):
        return self.raw.allocation_type

    @property
    def location_type(self):
        return self.raw.location_type

    @property
    def location_id(self):
        return self.raw.location_id

    @property
    def granularity_min(self):
        return self.raw.granularity_min

    @property
    def granularity_recommended(self):
        return self.raw.granularity_recommended

    @property
    def mapped_nbytes(self):
        return self.raw.mapped_nbytes

    @property
    def reserved_nbytes(self):
        return self.raw.reserved_nbytes

    @property
    def allowed_handle_types(self):
        return self.raw.allowed_handle_types

    @property
    def access(self):
        return self.raw.access

    @property
    def mapped_base(self):
        return self.raw.mapped_base

    @property
    def properties_result(self):
        return self.raw.properties_result

    @property
    def granularity_result(self):
        return self.raw.granularity_result

    @property
    def range_result(self):
        return self.raw.range_result

    @property
    def reservation_result(self):
        return self.raw.reservation_result

    @property
    def allowed_result(self):
        return self.raw.allowed_result

    @property
    def access_result(self):
        return self.raw.access_result


def host_allocate(nbytes, kind, name, directory):
    cdef int64_t size = _int64(nbytes, "nbytes")
    cdef int32_t wanted = _int32(kind, "kind")
    cdef object label_owner = _text(name, "name", "str")
    cdef object folder_owner = None if directory is None else _text(directory, "directory", "str or None")
    cdef const char *label = _chars(label_owner)
    cdef const char *folder = NULL if folder_owner is None else _chars(folder_owner)
    cdef RegionInfo made = RegionInfo.__new__(RegionInfo)
    cdef kvr_region_info *out = &made.raw
    cdef int32_t status
    with nogil:
        status = kvr_host_allocate(size, wanted, label, folder, out)
    _check(status)
    return made


def region_info(region):
    cdef RegionInfo found = RegionInfo.__new__(RegionInfo)
    _check(kvr_region_info_get(_int64(region, "region"), &found.raw))
    return found


def region_export(region):
    cdef int64_t handle = _int64(region, "region")
    cdef int32_t fd = -1
    cdef int32_t status
    with nogil:
        status = kvr_region_export(handle, &fd)
    _check(status)
    return fd


def region_import(fd, nbytes, physical_nbytes, region_id, device, inode, flags):
    cdef int32_t descriptor = _int32(fd, "fd")
    cdef int64_t size = _int64(nbytes, "nbytes")
    cdef int64_t physical = _int64(physical_nbytes, "physical_nbytes")
    cdef bytes identity = _exact_bytes(region_id, "region_id")
    cdef uint64_t st_dev = _uint64(device, "device")
    cdef uint64_t st_ino = _uint64(inode, "inode")
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef const uint8_t *name = <const uint8_t *>PyBytes_AS_STRING(identity)
    cdef RegionInfo made = RegionInfo.__new__(RegionInfo)
    cdef kvr_region_info *out = &made.raw
    cdef int32_t status
    _check_length("region_id", PyBytes_GET_SIZE(identity), KVR_REGION_ID_NBYTES, "bytes")
    with nogil:
        status = kvr_region_import(descriptor, size, physical, name, st_dev, st_ino, bits, out)
    _check(status)
    return made


def region_observe(region):
    cdef int64_t handle = _int64(region, "region")
    cdef HostObservation seen = HostObservation.__new__(HostObservation)
    cdef kvr_observation *out = &seen.raw
    cdef int32_t status
    with nogil:
        status = kvr_region_observe(handle, out)
    _check(status)
    return seen


def region_placement(region, nodes):
    cdef int64_t handle = _int64(region, "region")
    cdef _Buffer places = _out_int64s(nodes, "nodes")
    cdef int64_t *out = places.out_int64s()
    cdef int64_t capacity = places.entries()
    cdef int64_t count = 0
    cdef int32_t status
    with nogil:
        status = kvr_region_placement(handle, capacity, out, &count)
    _check(status)
    return count


def region_map(region, access, flags):
    cdef int64_t handle = _int64(region, "region")
    cdef int32_t wanted = _int32(access, "access")
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef MappingInfo made = MappingInfo.__new__(MappingInfo)
    cdef kvr_mapping_info *out = &made.raw
    cdef int32_t status
    with nogil:
        status = kvr_region_map(handle, wanted, bits, out)
    _check(status)
    return made


def region_close(region):
    cdef int64_t handle = _int64(region, "region")
    cdef int32_t status
    with nogil:
        status = kvr_region_close(handle)
    _check(status)


def mapping_info(mapping):
    cdef MappingInfo found = MappingInfo.__new__(MappingInfo)
    _check(kvr_mapping_info_get(_int64(mapping, "mapping"), &found.raw))
    return found


cdef class MappingBuffer:
    """Exports a mapping's bytes; each buffer taken from it is a use of the mapping."""

    cdef int64_t handle

    def __cinit__(self, handle):
        self.handle = handle

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef kvr_mapping_info info
        _check(kvr_mapping_view(self.handle, 1, &info))
        try:
            PyBuffer_FillInfo(buffer, self, <void *>info.address, info.nbytes, info.access != KVR_ACCESS_READ_WRITE, flags)
        except BaseException:
            kvr_mapping_view(self.handle, -1, &info)
            raise

    def __releasebuffer__(self, Py_buffer *buffer):
        cdef kvr_mapping_info info
        kvr_mapping_view(self.handle, -1, &info)


def mapping_buffer(mapping):
    cdef kvr_mapping_info info
    cdef int64_t handle = _int64(mapping, "mapping")
    cdef int64_t pid = getpid()
    _check(kvr_mapping_info_get(handle, &info), "mapping_buffer")
    if pid != _owner_pid:
        raise _status.make(KVR_ERROR_FORKED, KVR_DETAIL_FORKED, (_owner_pid, pid), "mapping_buffer")
    return MappingBuffer(handle)


cdef void _drop_dlpack(object capsule) noexcept:
    # A consumer renames the capsule and calls the deleter itself.
    if PyCapsule_IsValid(capsule, "dltensor"):
        kvr_dlpack_delete(PyCapsule_GetPointer(capsule, "dltensor"), 0)
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        kvr_dlpack_delete(PyCapsule_GetPointer(capsule, "dltensor_versioned"), 1)


def mapping_dlpack(mapping, device_type, device_id, is_versioned):
    cdef bint versioned = bool(is_versioned)
    cdef void *tensor = NULL
    _check(
        kvr_mapping_dlpack(
            _int64(mapping, "mapping"),
            _int32(device_type, "device_type"),
            _int32(device_id, "device_id"),
            versioned,
            &tensor,
        )
    )
    try:
        return PyCapsule_New(tensor, "dltensor_versioned" if versioned else "dltensor", _drop_dlpack)
    except BaseException:
        kvr_dlpack_delete(tensor, versioned)
        raise


def mapping_use(mapping, delta):
    cdef int64_t handle = _int64(mapping, "mapping")
    _check(kvr_mapping_use(handle, _int32(delta, "delta")))


def mapping_unmap(mapping):
    cdef int64_t handle = _int64(mapping, "mapping")
    cdef int32_t status
    with nogil:
        status = kvr_mapping_unmap(handle)
    _check(status)


# ---- CUDA memory ----


def cuda_info(ordinal):
    cdef int32_t number = _int32(ordinal, "ordinal")
    cdef kvr_cuda_info info
    cdef int32_t status
    with nogil:
        status = kvr_cuda_info_get(number, &info)
    _check(status)
    return _named(
        CudaInfo,
        (
            info.ordinal,
            info.driver_version,
            info.vmm,
            info.posix_fd,
            info.fabric,
            info.features,
            info.uuid[:16],
        ),
    )


def cuda_allocate(ordinal, nbytes, kind, flags):
    cdef int32_t number = _int32(ordinal, "ordinal")
    cdef int64_t size = _int64(nbytes, "nbytes")
    cdef int32_t wanted = _int32(kind, "kind")
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef RegionInfo made = RegionInfo.__new__(RegionInfo)
    cdef kvr_region_info *out = &made.raw
    cdef int32_t status
    with nogil:
        status = kvr_cuda_allocate(number, size, wanted, bits, out)
    _check(status)
    return made


def cuda_import(ordinal, kind, fd, fabric, nbytes, physical_nbytes, region_id):
    cdef int32_t number = _int32(ordinal, "ordinal")
    cdef int32_t wanted = _int32(kind, "kind")
    cdef int32_t descriptor = _int32(fd, "fd")
    cdef bytes token = _exact_bytes(fabric, "fabric")
    cdef int64_t size = _int64(nbytes, "nbytes")
    cdef int64_t physical = _int64(physical_nbytes, "physical_nbytes")
    cdef bytes identity = _exact_bytes(region_id, "region_id")
    cdef const uint8_t *payload = <const uint8_t *>PyBytes_AS_STRING(token)
    cdef const uint8_t *name = <const uint8_t *>PyBytes_AS_STRING(identity)
    cdef RegionInfo made = RegionInfo.__new__(RegionInfo)
    cdef kvr_region_info *out = &made.raw
    cdef int32_t status
    _check_length("fabric", PyBytes_GET_SIZE(token), KVR_FABRIC_NBYTES, "bytes")
    _check_length("region_id", PyBytes_GET_SIZE(identity), KVR_REGION_ID_NBYTES, "bytes")
    with nogil:
        status = kvr_cuda_import(number, wanted, descriptor, payload, size, physical, name, out)
    _check(status)
    return made


def cuda_export_fabric(region):
    cdef int64_t handle = _int64(region, "region")
    cdef uint8_t token[64]
    cdef int32_t status
    with nogil:
        status = kvr_cuda_export_fabric(handle, token)
    _check(status)
    return token[:64]


def cuda_fabric_done(region):
    _check(kvr_cuda_fabric_done(_int64(region, "region")))


def cuda_observe(region):
    cdef int64_t handle = _int64(region, "region")
    cdef CudaObservation seen = CudaObservation.__new__(CudaObservation)
    cdef kvr_cuda_observation *out = &seen.raw
    cdef int32_t status
    with nogil:
        status = kvr_cuda_observe(handle, out)
    _check(status)
    return seen


# ---- a part as a whole ----


def table_layout(slot_count, manifest_nbytes):
    cdef int64_t slots = _int64(slot_count, "slot_count")
    cdef kvr_table_layout layout
    _check(kvr_table_layout_get(slots, _int64(manifest_nbytes, "manifest_nbytes"), &layout))
    return _named(
        TableLayout,
        (
            layout.table_nbytes,
            layout.claims_nbytes,
            layout.record_offset_bytes,
            layout.link_offset_bytes,
            layout.bucket_offset_bytes,
            layout.bucket_count,
            layout.row_nbytes,
        ),
    )


def table_create(table_region, claims_region, part_id, slot_count, block_nbytes, region_count, manifest):
    cdef int64_t table = _int64(table_region, "table_region")
    cdef int64_t claims = _int64(claims_region, "claims_region")
    cdef bytes identity = _exact_bytes(part_id, "part_id")
    cdef int64_t slots = _int64(slot_count, "slot_count")
    cdef int64_t block = _int64(block_nbytes, "block_nbytes")
    cdef int64_t regions = _int64(region_count, "region_count")
    cdef _Buffer content = _bytes(manifest, "manifest")
    cdef const uint8_t *name = <const uint8_t *>PyBytes_AS_STRING(identity)
    cdef const uint8_t *data = content.bytes()
    cdef int64_t nbytes = content.view.len
    cdef int32_t status
    _check_length("part_id", PyBytes_GET_SIZE(identity), 16, "bytes")
    with nogil:
        status = kvr_table_create(table, claims, name, slots, block, regions, data, nbytes)
    _check(status)


def table_open(table_region, claims_region, lock_fd, role, session, row, lock_wait_ns):
    cdef int64_t table = _int64(table_region, "table_region")
    cdef int64_t claims = _int64(claims_region, "claims_region")
    cdef int32_t fd = _int32(lock_fd, "lock_fd")
    cdef int32_t part = _int32(role, "role")
    cdef int64_t number = _int64(session, "session")
    cdef int32_t place = _int32(row, "row")
    cdef int64_t wait_ns = _int64(lock_wait_ns, "lock_wait_ns")
    cdef int64_t out = 0
    cdef int32_t status
    with nogil:
        status = kvr_table_open(table, claims, fd, part, number, place, wait_ns, &out)
    _check(status)
    return out


def table_close(table):
    cdef int64_t handle = _int64(table, "table")
    cdef int32_t status
    with nogil:
        status = kvr_table_close(handle)
    _check(status)


def table_info(table):
    cdef kvr_table_info info
    _check(kvr_table_info_get(_int64(table, "table"), &info))
    return _named(
        TableInfo,
        (
            info.part_id[:16],
            info.slot_count,
            info.block_nbytes,
            info.region_count,
            info.slots_per_region,
            info.manifest_nbytes,
            info.session,
            info.role,
            info.row,
            info.operation_count,
            info.content_epoch,
            info.heartbeat_ns,
            info.capacity,
        ),
    )


def table_manifest(table):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t nbytes = 0
    cdef bytes content
    _check(kvr_table_manifest_get(handle, NULL, 0, &nbytes))
    content = PyBytes_FromStringAndSize(NULL, nbytes)
    _check(kvr_table_manifest_get(handle, <uint8_t *>PyBytes_AS_STRING(content), nbytes, &nbytes))
    return content


def table_bind(table, index, mapping):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t place = _int64(index, "index")
    _check(kvr_table_bind(handle, place, _int64(mapping, "mapping")))


def table_set_unready(table, unready):
    cdef int64_t handle = _int64(table, "table")
    _check(kvr_table_set_unready(handle, _int32(unready, "unready")))


def table_set_capacity(table, capacity):
    cdef int64_t handle = _int64(table, "table")
    _check(kvr_table_set_capacity(handle, _int64(capacity, "capacity")))


def table_beat(table, period_ns):
    cdef int64_t handle = _int64(table, "table")
    _check(kvr_table_beat(handle, _int64(period_ns, "period_ns")))


def table_set_state(table, state):
    cdef int64_t handle = _int64(table, "table")
    _check(kvr_table_set_state(handle, _int32(state, "state")))


def table_admit(table, row, session, role):
    cdef int64_t handle = _int64(table, "table")
    cdef int32_t place = _int32(row, "row")
    cdef int64_t number = _int64(session, "session")
    cdef int32_t part = _int32(role, "role")
    cdef int32_t status
    with nogil:
        status = kvr_table_admit(handle, place, number, part)
    _check(status)


def table_drop(table, row, session):
    cdef int64_t handle = _int64(table, "table")
    cdef int32_t place = _int32(row, "row")
    cdef int64_t number = _int64(session, "session")
    cdef int32_t status
    with nogil:
        status = kvr_table_drop(handle, place, number)
    _check(status)


def table_recover(table):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t freed = 0
    cdef int32_t status
    with nogil:
        status = kvr_table_recover(handle, &freed)
    _check(status)
    return freed


def table_restore(table):
    cdef int64_t handle = _int64(table, "table")
    cdef kvr_restore_result found
    cdef int32_t status
    with nogil:
        status = kvr_table_restore(handle, &found)
    _check(status)
    return _named(RestoreResult, (found.sealed_count, found.bad_count, found.freed_count))


def table_reset(table):
    cdef int64_t handle = _int64(table, "table")
    cdef int32_t status
    with nogil:
        status = kvr_table_reset(handle)
    _check(status)


def table_expire(table):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t removed = 0
    cdef int32_t status
    with nogil:
        status = kvr_table_expire(handle, &removed)
    _check(status)
    return removed


# ---- calls of a part's sessions ----


def table_match(table, keys, key_stride, key_nbytes):
    cdef int64_t handle = _int64(table, "table")
    cdef _Keys batch = _Keys(keys, key_stride, key_nbytes)
    cdef int64_t found = 0
    cdef int32_t status
    batch.possible()
    with nogil:
        status = kvr_table_match(handle, batch.keys, batch.stride, batch.nbytes, batch.count, &found)
    _check(status)
    return found


def table_lookup(table, keys, key_stride, key_nbytes, slots, generations):
    cdef int64_t handle = _int64(table, "table")
    cdef _Keys batch = _Keys(keys, key_stride, key_nbytes)
    cdef _Buffer places = _out_int64s(slots, "slots")
    cdef _Buffer numbers = _out_int64s(generations, "generations")
    cdef int64_t *out_slots = places.out_int64s()
    cdef int64_t *out_generations = numbers.out_int64s()
    cdef int32_t status
    if batch.possible():
        _check_length("slots", places.entries(), batch.count, "entries")
        _check_length("generations", numbers.entries(), batch.count, "entries")
    with nogil:
        status = kvr_table_lookup(
            handle, batch.keys, batch.stride, batch.nbytes, batch.count, out_slots, out_generations
        )
    _check(status)


def table_claim(table, keys, key_stride, key_nbytes, slots, generations):
    cdef int64_t handle = _int64(table, "table")
    cdef _Keys batch = _Keys(keys, key_stride, key_nbytes)
    cdef _Buffer places = _out_int64s(slots, "slots")
    cdef _Buffer numbers = _out_int64s(generations, "generations")
    cdef int64_t *out_slots = places.out_int64s()
    cdef int64_t *out_generations = numbers.out_int64s()
    cdef int64_t found = 0
    cdef int32_t status
    if batch.possible():
        _check_length("slots", places.entries(), batch.count, "entries")
        _check_length("generations", numbers.entries(), batch.count, "entries")
    with nogil:
        status = kvr_table_claim(
            handle, batch.keys, batch.stride, batch.nbytes, batch.count, out_slots, out_generations, &found
        )
    _check(status)
    return found


def table_claim_slots(table, slots, generations):
    cdef int64_t handle = _int64(table, "table")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef _Buffer numbers = _int64s(generations, "generations")
    cdef const int64_t *in_slots = places.int64s()
    cdef const int64_t *in_generations = numbers.int64s()
    cdef int64_t count = places.entries()
    cdef int32_t status
    _check_length("generations", numbers.entries(), count, "entries")
    with nogil:
        status = kvr_table_claim_slots(handle, in_slots, in_generations, count)
    _check(status)


def table_release(table, slots):
    cdef int64_t handle = _int64(table, "table")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef const int64_t *in_slots = places.int64s()
    cdef int64_t count = places.entries()
    cdef int32_t status
    with nogil:
        status = kvr_table_release(handle, in_slots, count)
    _check(status)


def table_touch(table, keys, key_stride, key_nbytes):
    cdef int64_t handle = _int64(table, "table")
    cdef _Keys batch = _Keys(keys, key_stride, key_nbytes)
    cdef int64_t found = 0
    cdef int32_t status
    batch.possible()
    with nogil:
        status = kvr_table_touch(handle, batch.keys, batch.stride, batch.nbytes, batch.count, &found)
    _check(status)
    return found


def table_reserve(
    table, keys, key_stride, key_nbytes, named_slots, flags, slots, generations, evicted_keys, evicted_key_nbytes
):
    cdef int64_t handle = _int64(table, "table")
    cdef _Keys batch = _Keys(keys, key_stride, key_nbytes)
    cdef _Buffer named = None if named_slots is None else _int64s(named_slots, "named_slots")
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef _Buffer places = _out_int64s(slots, "slots")
    cdef _Buffer numbers = _out_int64s(generations, "generations")
    cdef _Buffer gone = _out_bytes(evicted_keys, "evicted_keys")
    cdef _Buffer gone_sizes = _out_bytes(evicted_key_nbytes, "evicted_key_nbytes")
    cdef const int64_t *in_slots = NULL
    cdef int64_t *out_slots = places.out_int64s()
    cdef int64_t *out_generations = numbers.out_int64s()
    cdef uint8_t *out_keys = gone.out_bytes()
    cdef uint8_t *out_nbytes = gone_sizes.out_bytes()
    cdef int64_t evicted = 0
    cdef int32_t status
    if batch.possible():
        if named is not None:
            in_slots = named.int64s()
            _check_length("named_slots", named.entries(), batch.count, "entries")
        _check_length("slots", places.entries(), batch.count, "entries")
        _check_length("generations", numbers.entries(), batch.count, "entries")
        _check_length("evicted_keys", gone.view.len, KVR_KEY_NBYTES * batch.count, "bytes")
        _check_length("evicted_key_nbytes", gone_sizes.view.len, batch.count, "bytes")
    with nogil:
        status = kvr_table_reserve(
            handle,
            batch.keys,
            batch.stride,
            batch.nbytes,
            batch.count,
            in_slots,
            bits,
            out_slots,
            out_generations,
            out_keys,
            out_nbytes,
            &evicted,
        )
    _check(status)
    return evicted


def table_commit(table, slots, generations, flags):
    cdef int64_t handle = _int64(table, "table")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef _Buffer numbers = _int64s(generations, "generations")
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef const int64_t *in_slots = places.int64s()
    cdef const int64_t *in_generations = numbers.int64s()
    cdef int64_t count = places.entries()
    cdef int32_t status
    _check_length("generations", numbers.entries(), count, "entries")
    with nogil:
        status = kvr_table_commit(handle, in_slots, in_generations, count, bits)
    _check(status)


def table_abort(table, slots, generations):
    cdef int64_t handle = _int64(table, "table")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef _Buffer numbers = _int64s(generations, "generations")
    cdef const int64_t *in_slots = places.int64s()
    cdef const int64_t *in_generations = numbers.int64s()
    cdef int64_t count = places.entries()
    cdef int64_t freed = 0
    cdef int32_t status
    _check_length("generations", numbers.entries(), count, "entries")
    with nogil:
        status = kvr_table_abort(handle, in_slots, in_generations, count, &freed)
    _check(status)
    return freed


def table_evict(table, evict_count, keys, key_stride, key_nbytes):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t wanted = _int64(evict_count, "evict_count")
    cdef _Keys batch = _Keys(keys, key_stride, key_nbytes)
    cdef int64_t evicted = 0
    cdef int32_t status
    batch.possible()
    with nogil:
        status = kvr_table_evict(handle, wanted, batch.keys, batch.stride, batch.nbytes, batch.count, &evicted)
    _check(status)
    return evicted


def table_clear(table):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t removed = 0
    cdef int64_t kept = 0
    cdef int32_t status
    with nogil:
        status = kvr_table_clear(handle, &removed, &kept)
    _check(status)
    return removed, kept


def table_verify(table, slots, verdicts):
    cdef int64_t handle = _int64(table, "table")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef _Buffer answers = _out_bytes(verdicts, "verdicts")
    cdef const int64_t *in_slots = places.int64s()
    cdef uint8_t *out = answers.out_bytes()
    cdef int64_t count = places.entries()
    cdef int32_t status
    _check_length("verdicts", answers.view.len, count, "bytes")
    with nogil:
        status = kvr_table_verify(handle, in_slots, count, out)
    _check(status)


def table_invalidate(table, slots, generations):
    cdef int64_t handle = _int64(table, "table")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef _Buffer numbers = _int64s(generations, "generations")
    cdef const int64_t *in_slots = places.int64s()
    cdef const int64_t *in_generations = numbers.int64s()
    cdef int64_t count = places.entries()
    cdef int64_t taken = 0
    cdef int32_t status
    _check_length("generations", numbers.entries(), count, "entries")
    with nogil:
        status = kvr_table_invalidate(handle, in_slots, in_generations, count, &taken)
    _check(status)
    return taken


def table_inventory(table, first_slot, slots, generations, keys, key_nbytes):
    cdef int64_t handle = _int64(table, "table")
    cdef int64_t first = _int64(first_slot, "first_slot")
    cdef _Buffer places = _out_int64s(slots, "slots")
    cdef _Buffer numbers = _out_int64s(generations, "generations")
    cdef _Buffer names = _out_bytes(keys, "keys")
    cdef _Buffer sizes = _out_bytes(key_nbytes, "key_nbytes")
    cdef int64_t *out_slots = places.out_int64s()
    cdef int64_t *out_generations = numbers.out_int64s()
    cdef uint8_t *out_keys = names.out_bytes()
    cdef uint8_t *out_nbytes = sizes.out_bytes()
    cdef int64_t capacity = places.entries()
    cdef int64_t count = 0
    cdef int64_t following = -1
    cdef int32_t status
    _check_length("generations", numbers.entries(), capacity, "entries")
    _check_length("keys", names.view.len, KVR_KEY_NBYTES * capacity, "bytes")
    _check_length("key_nbytes", sizes.view.len, capacity, "bytes")
    with nogil:
        status = kvr_table_inventory(
            handle, first, capacity, out_slots, out_generations, out_keys, out_nbytes, &count, &following
        )
    _check(status)
    return count, following


def table_stats(table):
    cdef int64_t handle = _int64(table, "table")
    cdef kvr_table_stats stats
    cdef int32_t status
    with nogil:
        status = kvr_table_stats_get(handle, &stats)
    _check(status)
    return _named(
        TableStats,
        (
            stats.state,
            stats.content_epoch,
            stats.writer_session,
            stats.dirty,
            stats.slot_count,
            stats.free_count,
            stats.writing_count,
            stats.sealed_count,
            stats.stale_count,
            stats.claimed_count,
            stats.stored_total,
            stats.evicted_total,
            stats.replaced_total,
            stats.cleared_total,
            stats.corrupt_total,
            stats.freed_total,
            stats.owned_count,
        ),
    )


# ---- copies ----


def queue_open(thread_count, flags):
    cdef int32_t threads = _int32(thread_count, "thread_count")
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef int64_t out = 0
    cdef int32_t status
    with nogil:
        status = kvr_queue_open(threads, bits, &out)
    _check(status)
    return out


def queue_drain(queue, wait_ns):
    cdef int64_t handle = _int64(queue, "queue")
    cdef int64_t wait = _int64(wait_ns, "wait_ns")
    cdef int32_t status
    with nogil:
        status = kvr_queue_drain(handle, wait)
    _check(status)
    return status != KVR_PENDING


def queue_close(queue, wait_ns):
    cdef int64_t handle = _int64(queue, "queue")
    cdef int64_t wait = _int64(wait_ns, "wait_ns")
    cdef int32_t status
    with nogil:
        status = kvr_queue_close(handle, wait)
    _check(status)


def queue_info(queue):
    cdef kvr_queue_info info
    _check(kvr_queue_info_get(_int64(queue, "queue"), &info))
    return _named(QueueInfo, (info.handle, info.fd, info.thread_count, info.submitted, info.done, info.failed, info.cancelled, info.queued, info.running, info.is_closing, info.paused))


def queue_completed(queue, operations):
    cdef int64_t handle = _int64(queue, "queue")
    cdef _Buffer listed = _out_int64s(operations, "operations")
    cdef int64_t count = 0
    _check(kvr_queue_completed(handle, listed.entries(), listed.out_int64s(), &count))
    return count


def queue_fault(queue, fault, index, value):
    cdef int64_t handle = _int64(queue, "queue")
    cdef int32_t kind = _int32(fault, "fault")
    cdef int64_t entry = _int64(index, "index")
    _check(kvr_queue_fault(handle, kind, entry, _int64(value, "value")))


def queue_resume(queue):
    _check(kvr_queue_resume(_int64(queue, "queue")))


cdef _Buffer _words(object value, str name, int64_t words, bint many):
    """An int64 array that holds one struct of so many words, or any number of them."""
    cdef _Buffer found = _int64s(value, name)
    if many and found.entries() % words:
        _check_length(name, found.entries(), (found.entries() // words + 1) * words, "entries")
    elif not many:
        _check_length(name, found.entries(), words, "entries")
    return found


def copy_submit(queue, destination, source, destination_offsets, source_offsets, lengths, after):
    cdef int64_t handle = _int64(queue, "queue")
    cdef _Buffer to = _words(destination, "destination", sizeof(kvr_memory) // 8, False)
    cdef _Buffer since = _words(source, "source", sizeof(kvr_memory) // 8, False)
    cdef _Buffer to_offsets = _int64s(destination_offsets, "destination_offsets")
    cdef _Buffer from_offsets = _int64s(source_offsets, "source_offsets")
    cdef _Buffer sizes = _int64s(lengths, "lengths")
    cdef _Buffer waits = _words(after, "after", sizeof(kvr_dependency) // 8, True)
    cdef const kvr_memory *dst = <const kvr_memory *>to.view.buf
    cdef const kvr_memory *src = <const kvr_memory *>since.view.buf
    cdef const int64_t *dst_offsets = to_offsets.int64s()
    cdef const int64_t *src_offsets = from_offsets.int64s()
    cdef const int64_t *nbytes = sizes.int64s()
    cdef int64_t count = sizes.entries()
    cdef const kvr_dependency *dependencies = <const kvr_dependency *>waits.view.buf
    cdef int64_t dependency_count = waits.view.len // <int64_t>sizeof(kvr_dependency)
    cdef int64_t out = 0
    cdef int32_t status
    _check_length("destination_offsets", to_offsets.entries(), count, "entries")
    _check_length("source_offsets", from_offsets.entries(), count, "entries")
    with nogil:
        status = kvr_copy_submit(handle, dst, src, dst_offsets, src_offsets, nbytes, count, dependencies, dependency_count, &out)
    _check(status)
    return out


def copy_slots(queue, table, direction, mappings, slots, generations, engine_blocks, segments, flags, after):
    cdef int64_t handle = _int64(queue, "queue")
    cdef int64_t part = _int64(table, "table")
    cdef int32_t way = _int32(direction, "direction")
    cdef _Buffer regions = _int64s(mappings, "mappings")
    cdef _Buffer places = _int64s(slots, "slots")
    cdef _Buffer numbers = _int64s(generations, "generations")
    cdef _Buffer blocks = _int64s(engine_blocks, "engine_blocks")
    cdef _Buffer slices = _words(segments, "segments", sizeof(kvr_segment) // 8, True)
    cdef uint32_t bits = _uint32(flags, "flags")
    cdef _Buffer waits = _words(after, "after", sizeof(kvr_dependency) // 8, True)
    cdef const int64_t *in_mappings = regions.int64s()
    cdef int64_t mapping_count = regions.entries()
    cdef const int64_t *in_slots = places.int64s()
    cdef const int64_t *in_generations = numbers.int64s()
    cdef const int64_t *in_blocks = blocks.int64s()
    cdef int64_t count = places.entries()
    cdef const kvr_segment *in_segments = <const kvr_segment *>slices.view.buf
    cdef int64_t segment_count = slices.view.len // <int64_t>sizeof(kvr_segment)
    cdef const kvr_dependency *dependencies = <const kvr_dependency *>waits.view.buf
    cdef int64_t dependency_count = waits.view.len // <int64_t>sizeof(kvr_dependency)
    cdef int64_t out = 0
    cdef int32_t status
    _check_length("generations", numbers.entries(), count, "entries")
    _check_length("engine_blocks", blocks.entries(), count, "entries")
    with nogil:
        status = kvr_copy_slots(
            handle,
            part,
            way,
            in_mappings,
            mapping_count,
            in_slots,
            in_generations,
            in_blocks,
            count,
            in_segments,
            segment_count,
            bits,
            dependencies,
            dependency_count,
            &out,
        )
    _check(status)
    return out


def operation_info(operation):
    cdef kvr_operation_info info
    _check(kvr_operation_info_get(_int64(operation, "operation"), &info))
    return _named(OperationInfo, (info.handle, info.queue, info.state, info.quarantine, info.entry_count, info.total_nbytes, info.moved_nbytes, info.failed_index, info.quarantine_ns))


def operation_error(operation):
    cdef kvr_error error
    _check(kvr_operation_error_get(_int64(operation, "operation"), &error))
    return _made(&error, None) if error.status else None


def operation_wait(operation, wait_ns):
    cdef int64_t handle = _int64(operation, "operation")
    cdef int64_t wait = _int64(wait_ns, "wait_ns")
    cdef int32_t status
    with nogil:
        status = kvr_operation_wait(handle, wait)
    _check(status)
    return status != KVR_PENDING


def operation_cancel(operation):
    cdef int64_t handle = _int64(operation, "operation")
    cdef int32_t status
    with nogil:
        status = kvr_operation_cancel(handle)
    _check(status)


def operation_release(operation):
    _check(kvr_operation_release(_int64(operation, "operation")))


def operation_abandon(operation):
    cdef int64_t handle = _int64(operation, "operation")
    cdef int32_t status
    with nogil:
        status = kvr_operation_abandon(handle)
    _check(status)


def quarantine(operations):
    cdef _Buffer listed = _out_int64s(operations, "operations")
    cdef int64_t count = 0
    _check(kvr_quarantine_get(listed.entries(), listed.out_int64s(), &count))
    return count


def quarantine_limit_set(limit_nbytes):
    _check(kvr_quarantine_limit_set(_int64(limit_nbytes, "limit_nbytes")))


def copy_counts():
    cdef kvr_copy_counts counts
    kvr_copy_counts_get(&counts)
    return _named(CopyCounts, (counts.queues, counts.operations, counts.in_flight, counts.quarantined, counts.quarantine_nbytes, counts.quarantine_limit, counts.fds))
