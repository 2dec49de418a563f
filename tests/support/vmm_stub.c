/* A GPU driver without a GPU: the calls that kvxfer.memory's CUDA and HIP drivers make, over memfds.
 * One file for both vendors: it stands for one library, and the two differ in little but names.
 *
 *   gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 vmm_stub.c
 *   gcc -shared -fPIC -DHIP -Wl,-soname,libamdhip64.so.7 -o libamdhip64.so vmm_stub.c
 *
 * An allocation is a memfd, a reservation unbacked addresses; mapping makes the pages appear there
 * untouchable, setting access makes them readable and writable. Stricter than the drivers where
 * those leave a mistake undefined: each mistake has an error. Environment, read at each call:
 *
 *   STUB_MEMORY_BYTES   physical memory of each device (default 256 MiB)
 *   STUB_HANDLE_TYPES   handle types that can be asked for, a sum of 1 (descriptor) and 8 (fabric);
 *                       default 9. HIP refuses a combination, as the runtime does
 *   STUB_GPU_DIRECT     0: allocations that an RDMA card may reach are refused (default 1)
 *   STUB_READ_ONLY      0: access for reading only is refused (default 1)
 *   STUB_HIP_VERSION    what hipRuntimeGetVersion says (default 71260850); below 7.12 the defect of
 *                       hipMemSetAccess is there, at each call rather than at times
 *   STUB_FAIL           'name:n' or 'name:n:code': the n-th call of that entry point since
 *                       stub_reset(), each call if n is 0, fails and changes nothing (default
 *                       code 999)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef HIP
#define NAME(cuda, hip) hip
#define ERROR_PREFIX "hipError"
#else
#define NAME(cuda, hip) cuda
#define ERROR_PREFIX "CUDA_ERROR_"
#endif
#define API __attribute__((visibility("default")))

enum { GRANULE = 2 << 20, DEVICES = 2, SLOTS = 256, DEPTH = 64 };
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
    UNKNOWN = 999
};
enum { DESCRIPTOR = 1, FABRIC = 8, PINNED = 1, ON_DEVICE = 1, READ_ONLY = 1, READ_WRITE = 3 };

typedef struct { int type, id; } Location;
typedef struct { Location location; int flags; } Access;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    unsigned char compression, gpu_direct;
    unsigned short usage;
    unsigned char reserved[4];
} Properties;

typedef struct { uintptr_t base; size_t size; void *raw; size_t raw_size; } Reservation;
typedef struct { uintptr_t id; size_t size; int fd, device, types, mapped, owned, imported; } Chunk;
typedef struct { uintptr_t start; size_t size; Chunk *chunk; } Mapping;

static Reservation reservations[SLOTS];
static Chunk chunks[SLOTS];
static Mapping mappings[SLOTS];
static uintptr_t last_id;
static size_t used[DEVICES];
static int initialized;
static char call_log[1 << 16];
static size_t log_length;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* CUDA: a stack of devices; HIP: its bottom entry is the current device and always there. */
static __thread int stack[DEPTH];
static __thread int depth = NAME(0, 1);

static void unlock(int *unused) { (void)unused; pthread_mutex_unlock(&lock); }

/* The rest of an entry point runs alone, is in the log, and fails if it is told to. */
#define ENTER                                                                      \
    int entered __attribute__((cleanup(unlock))) = pthread_mutex_lock(&lock);      \
    do {                                                                           \
        int failure = note(__func__);                                              \
        if (failure) return failure;                                               \
    } while (0)
#define REQUIRE(condition, code)                                                   \
    do {                                                                           \
        if (!(condition)) return (code);                                           \
    } while (0)

static size_t setting(const char *name, size_t fallback) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : fallback;
}

static int calls_of(const char *name) {
    int count = 0;
    size_t length = strlen(name);
    for (char *at = call_log; (at = strstr(at, name)); at += length)
        count += at[length] == '\n' && (at == call_log || at[-1] == '\n');
    return count;
}

static int note(const char *name) {
    size_t room = sizeof call_log - log_length;
    if (strlen(name) + 2 > room) abort(); /* a test that never resets the log */
    log_length += (size_t)snprintf(call_log + log_length, room, "%s\n", name);
    const char *text = getenv("STUB_FAIL");
    char wanted[64];
    int nth = 0, code = UNKNOWN;
    if (!text || sscanf(text, "%63[^:]:%d:%d", wanted, &nth, &code) < 2) return OK;
    return !strcmp(wanted, name) && (!nth || calls_of(name) == nth) ? code : OK;
}

static int is_aligned(uintptr_t value, size_t to) { return value % to == 0; }
static int current(void) { return depth ? stack[depth - 1] : -1; }

static Chunk *chunk_of(uintptr_t id) {
    for (int i = 0; i < SLOTS; i++)
        if (id && chunks[i].id == id && chunks[i].owned) return &chunks[i];
    return NULL;
}

static Reservation *reservation_around(uintptr_t start, size_t size) {
    for (int i = 0; i < SLOTS; i++) {
        Reservation *r = &reservations[i];
        if (r->size && r->base <= start && start + size <= r->base + r->size) return r;
    }
    return NULL;
}

static int overlaps(const Mapping *m, uintptr_t start, size_t size) {
    return m->size && m->start < start + size && start < m->start + m->size;
}

/* Whether whole mappings, and nothing else, fill [start, start + size). */
static int is_filled(uintptr_t start, size_t size) {
    size_t filled = 0;
    for (int i = 0; i < SLOTS; i++) {
        const Mapping *m = &mappings[i];
        if (!overlaps(m, start, size)) continue;
        if (m->start < start || m->start + m->size > start + size) return 0;
        filled += m->size;
    }
    return size && filled == size;
}

static void drop_if_unused(Chunk *chunk) {
    if (chunk->owned || chunk->mapped) return;
    if (!chunk->imported) used[chunk->device] -= chunk->size;
    close(chunk->fd);
    memset(chunk, 0, sizeof *chunk);
}

static int new_chunk(uintptr_t *handle, Chunk like) {
    for (int i = 0; i < SLOTS; i++) {
        if (chunks[i].id) continue;
        like.id = ++last_id;
        like.owned = 1;
        chunks[i] = like;
        *handle = like.id;
        return OK;
    }
    abort();
}

static int check_properties(const Properties *p) {
    REQUIRE(p && p->type == PINNED && p->location.type == ON_DEVICE, INVALID_VALUE);
    REQUIRE(p->location.id >= 0 && p->location.id < DEVICES, INVALID_DEVICE);
    return OK;
}

/* ---- devices ------------------------------------------------------------------------------- */

API int NAME(cuInit, hipInit)(unsigned flags) {
    ENTER;
    REQUIRE(flags == 0, INVALID_VALUE);
    initialized = 1;
    return OK;
}

#ifdef HIP
API int hipRuntimeGetVersion(int *version) {
    ENTER;
    *version = (int)setting("STUB_HIP_VERSION", 71260850);
    return OK;
}

API int hipGetDevice(int *device) {
    ENTER;
    *device = current();
    return OK;
}

API int hipSetDevice(int device) {
    ENTER;
    REQUIRE(initialized, NOT_INITIALIZED);
    REQUIRE(device >= 0 && device < DEVICES, INVALID_DEVICE);
    stack[depth - 1] = device;
    return OK;
}
#else
API int cuDeviceGet(int *device, int ordinal) {
    ENTER;
    REQUIRE(initialized, NOT_INITIALIZED);
    REQUIRE(ordinal >= 0 && ordinal < DEVICES, INVALID_DEVICE);
    *device = ordinal;
    return OK;
}

/* A context is its device's number plus one. */
API int cuDevicePrimaryCtxRetain(uintptr_t *context, int device) {
    ENTER;
    REQUIRE(device >= 0 && device < DEVICES, INVALID_DEVICE);
    *context = (uintptr_t)device + 1;
    return OK;
}

API int cuCtxPushCurrent(uintptr_t context) {
    ENTER;
    REQUIRE(context >= 1 && context <= DEVICES && depth < DEPTH, INVALID_CONTEXT);
    stack[depth++] = (int)context - 1;
    return OK;
}

API int cuCtxPopCurrent(uintptr_t *context) {
    ENTER;
    REQUIRE(depth, INVALID_CONTEXT);
    depth--;
    if (context) *context = (uintptr_t)stack[depth] + 1;
    return OK;
}
#endif

API int NAME(cuCtxSynchronize, hipDeviceSynchronize)(void) {
    ENTER;
    REQUIRE(current() >= 0, INVALID_CONTEXT);
    return OK;
}

API int NAME(cuMemGetInfo, hipMemGetInfo)(size_t *free_bytes, size_t *total_bytes) {
    ENTER;
    REQUIRE(current() >= 0, INVALID_CONTEXT);
    *total_bytes = setting("STUB_MEMORY_BYTES", (size_t)256 << 20);
    *free_bytes = *total_bytes - used[current()];
    return OK;
}

/* ---- addresses ----------------------------------------------------------------------------- */

API int NAME(cuMemAddressReserve, hipMemAddressReserve)(
    uintptr_t *base, size_t size, size_t alignment, uintptr_t hint, unsigned long long flags) {
    ENTER;
    REQUIRE(size && is_aligned(size, GRANULE) && !hint && !flags, INVALID_VALUE);
    REQUIRE((alignment & (alignment - 1)) == 0, INVALID_VALUE);
    if (alignment < GRANULE) alignment = GRANULE;
    Reservation *r = reservations;
    while (r < reservations + SLOTS && r->size) r++;
    if (r == reservations + SLOTS) abort();
    size_t raw_size = size + alignment;
    void *raw = mmap(NULL, raw_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(raw != MAP_FAILED, OUT_OF_MEMORY);
    uintptr_t start = ((uintptr_t)raw + alignment - 1) & ~(alignment - 1);
    *r = (Reservation){start, size, raw, raw_size};
    *base = start;
    return OK;
}

API int NAME(cuMemAddressFree, hipMemAddressFree)(uintptr_t base, size_t size) {
    ENTER;
    Reservation *r = reservation_around(base, size);
    REQUIRE(r && r->base == base && r->size == size, INVALID_VALUE);
    for (int i = 0; i < SLOTS; i++) REQUIRE(!overlaps(&mappings[i], base, size), INVALID_VALUE);
    munmap(r->raw, r->raw_size);
    memset(r, 0, sizeof *r);
    return OK;
}

/* ---- allocations --------------------------------------------------------------------------- */

API int NAME(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity)(
    size_t *granularity, const Properties *properties, int option) {
    ENTER;
    int code = check_properties(properties);
    REQUIRE(code == OK, code);
    REQUIRE(option == 0 || option == 1, INVALID_VALUE);
    *granularity = GRANULE;
    return OK;
}

API int NAME(cuMemCreate, hipMemCreate)(
    uintptr_t *handle, size_t size, const Properties *properties, unsigned long long flags) {
    ENTER;
    int code = check_properties(properties);
    REQUIRE(code == OK, code);
    REQUIRE(size && is_aligned(size, GRANULE) && !flags, INVALID_VALUE);
    int types = properties->handle_types, device = properties->location.id;
#ifdef HIP
    REQUIRE(types == 0 || types == DESCRIPTOR || types == FABRIC, NOT_SUPPORTED);
    REQUIRE(device == current(), INVALID_DEVICE);
#endif
    REQUIRE(!(types & ~(int)setting("STUB_HANDLE_TYPES", DESCRIPTOR | FABRIC)), NOT_PERMITTED);
    REQUIRE(!properties->gpu_direct || setting("STUB_GPU_DIRECT", 1), NOT_SUPPORTED);
    size_t total = setting("STUB_MEMORY_BYTES", (size_t)256 << 20);
    REQUIRE(used[device] <= total && size <= total - used[device], OUT_OF_MEMORY);
    int fd = memfd_create("stub", MFD_CLOEXEC);
    REQUIRE(fd >= 0, OUT_OF_MEMORY);
    if (ftruncate(fd, (off_t)size)) abort();
    used[device] += size;
    return new_chunk(handle, (Chunk){.size = size, .fd = fd, .device = device, .types = types});
}

API int NAME(cuMemRelease, hipMemRelease)(uintptr_t handle) {
    ENTER;
    Chunk *chunk = chunk_of(handle);
    REQUIRE(chunk, INVALID_HANDLE);
    chunk->owned = 0;
    drop_if_unused(chunk);
    return OK;
}

API int NAME(cuMemMap, hipMemMap)(
    uintptr_t start, size_t size, size_t offset, uintptr_t handle, unsigned long long flags) {
    ENTER;
    Chunk *chunk = chunk_of(handle);
    REQUIRE(chunk, INVALID_HANDLE);
    REQUIRE(is_aligned(start, GRANULE) && size == chunk->size && !offset && !flags, INVALID_VALUE);
    REQUIRE(reservation_around(start, size), INVALID_VALUE);
    Mapping *free_slot = NULL;
    for (int i = 0; i < SLOTS; i++) {
        REQUIRE(!overlaps(&mappings[i], start, size), INVALID_VALUE);
        if (!mappings[i].size) free_slot = &mappings[i];
    }
    if (!free_slot) abort();
    void *at = mmap((void *)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->fd, 0);
    REQUIRE(at != MAP_FAILED, OUT_OF_MEMORY);
    *free_slot = (Mapping){start, size, chunk};
    chunk->mapped++;
    return OK;
}

API int NAME(cuMemUnmap, hipMemUnmap)(uintptr_t start, size_t size) {
    ENTER;
    REQUIRE(is_filled(start, size), INVALID_VALUE);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void *)start, size, PROT_NONE, flags, -1, 0) == MAP_FAILED) abort();
    for (int i = 0; i < SLOTS; i++) {
        if (!overlaps(&mappings[i], start, size)) continue;
        mappings[i].chunk->mapped--;
        drop_if_unused(mappings[i].chunk);
        memset(&mappings[i], 0, sizeof mappings[i]);
    }
    return OK;
}

#ifdef HIP
static const Mapping *mapping_at(const Reservation *r, uintptr_t from) {
    const Mapping *first = NULL;
    for (int i = 0; i < SLOTS; i++) {
        const Mapping *m = &mappings[i];
        if (!overlaps(m, r->base, r->size) || m->start < from) continue;
        if (!first || m->start < first->start) first = m;
    }
    return first;
}

/* What runtimes before 7.12 do: sizes are summed from the reservation's first mapping on. */
static int sums_up_from_the_first(uintptr_t start, size_t size) {
    const Reservation *r = reservation_around(start, size);
    size_t sum = 0;
    const Mapping *m = mapping_at(r, r->base);
    for (; m && sum < size; m = mapping_at(r, m->start + m->size)) sum += m->size;
    return sum == size;
}
#endif

API int NAME(cuMemSetAccess, hipMemSetAccess)(
    uintptr_t start, size_t size, const Access *access, size_t count) {
    ENTER;
    REQUIRE(access && count == 1, INVALID_VALUE);
    int writable = access->flags == READ_WRITE;
    REQUIRE(writable || access->flags == READ_ONLY, INVALID_VALUE);
    REQUIRE(writable || setting("STUB_READ_ONLY", 1), NOT_SUPPORTED);
    REQUIRE(access->location.type == ON_DEVICE && is_filled(start, size), INVALID_VALUE);
#ifdef HIP
    int version = (int)setting("STUB_HIP_VERSION", 71260850);
    REQUIRE(version >= 71200000 || sums_up_from_the_first(start, size), INVALID_VALUE);
#endif
    for (int i = 0; i < SLOTS; i++)
        if (overlaps(&mappings[i], start, size))
            REQUIRE(mappings[i].chunk->device == access->location.id, INVALID_DEVICE);
    if (mprotect((void *)start, size, PROT_READ | (writable ? PROT_WRITE : 0))) abort();
    return OK;
}

API int NAME(cuMemExportToShareableHandle, hipMemExportToShareableHandle)(
    int *fd, uintptr_t handle, int type, unsigned long long flags) {
    ENTER;
    Chunk *chunk = chunk_of(handle);
    REQUIRE(chunk, INVALID_HANDLE);
    REQUIRE(!flags && type == DESCRIPTOR, INVALID_VALUE);
    REQUIRE(NAME(chunk->types & type, chunk->types == type), INVALID_VALUE);
    *fd = fcntl(chunk->fd, F_DUPFD_CLOEXEC, 0);
    REQUIRE(*fd >= 0, OUT_OF_MEMORY);
    return OK;
}

API int NAME(cuMemImportFromShareableHandle, hipMemImportFromShareableHandle)(
    uintptr_t *handle, uintptr_t os_handle, int type) {
    ENTER;
    struct stat what;
    REQUIRE(type == DESCRIPTOR && NAME(1, os_handle), INVALID_VALUE);
    REQUIRE(!fstat((int)os_handle, &what) && S_ISREG(what.st_mode), INVALID_VALUE);
    REQUIRE(what.st_size && is_aligned((uintptr_t)what.st_size, GRANULE), INVALID_VALUE);
    REQUIRE(current() >= 0, INVALID_CONTEXT);
    int fd = fcntl((int)os_handle, F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, OUT_OF_MEMORY);
    Chunk like = {.size = (size_t)what.st_size, .fd = fd, .device = current(), .imported = 1};
    like.types = DESCRIPTOR;
    return new_chunk(handle, like);
}

/* ---- what a code is called ----------------------------------------------------------------- */

static const char *name_of(int code) {
    switch (code) {
    case INVALID_VALUE: return ERROR_PREFIX NAME("INVALID_VALUE", "InvalidValue");
    case OUT_OF_MEMORY: return ERROR_PREFIX NAME("OUT_OF_MEMORY", "OutOfMemory");
    case INVALID_DEVICE: return ERROR_PREFIX NAME("INVALID_DEVICE", "InvalidDevice");
    case INVALID_CONTEXT: return ERROR_PREFIX NAME("INVALID_CONTEXT", "InvalidContext");
    case INVALID_HANDLE: return ERROR_PREFIX NAME("INVALID_HANDLE", "InvalidHandle");
    case NOT_PERMITTED: return ERROR_PREFIX NAME("NOT_PERMITTED", "NotPermitted");
    case NOT_SUPPORTED: return ERROR_PREFIX NAME("NOT_SUPPORTED", "NotSupported");
    case UNKNOWN: return ERROR_PREFIX NAME("UNKNOWN", "Unknown");
    default: return NULL;
    }
}

#ifdef HIP
API const char *hipGetErrorName(int code) { return name_of(code); }
API const char *hipGetErrorString(int code) { return name_of(code) ? "stub text" : NULL; }
#else
static int cuGetErrorName(int code, const char **name) {
    *name = name_of(code);
    return *name ? OK : INVALID_VALUE;
}

static int cuGetErrorString(int code, const char **text) {
    *text = name_of(code) ? "stub text" : NULL;
    return *text ? OK : INVALID_VALUE;
}

#define ENTRY(name) {#name, (void *)name}
static const struct { const char *name; void *function; } entries[] = {
    ENTRY(cuInit), ENTRY(cuDeviceGet), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxPushCurrent),
    ENTRY(cuCtxPopCurrent), ENTRY(cuCtxSynchronize), ENTRY(cuMemGetInfo),
    ENTRY(cuMemAddressReserve), ENTRY(cuMemAddressFree), ENTRY(cuMemGetAllocationGranularity),
    ENTRY(cuMemCreate), ENTRY(cuMemRelease), ENTRY(cuMemMap), ENTRY(cuMemUnmap),
    ENTRY(cuMemSetAccess), ENTRY(cuMemExportToShareableHandle),
    ENTRY(cuMemImportFromShareableHandle), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
};

/* The one name that is looked up in the library; all others are asked for here. */
API int cuGetProcAddress_v2(
    const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(entries[i].name, name)) *function = entries[i].function;
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : 500;
}
#endif

/* ---- for the tests ------------------------------------------------------------------------- */

/* Entry points called since stub_reset(), one a line, in order. Valid until the next call. */
API const char *stub_log(void) { return call_log; }

API void stub_reset(void) {
    pthread_mutex_lock(&lock);
    log_length = 0;
    call_log[0] = 0;
    pthread_mutex_unlock(&lock);
}

/* The handle that was made last: a test may have to release what a failed call left. */
API uintptr_t stub_last_handle(void) { return last_id; }

/* The calling thread's device, -1 for none. */
API int stub_current_device(void) { return current(); }

API int stub_live_handles(void) {
    int count = 0;
    for (int i = 0; i < SLOTS; i++) count += chunks[i].owned;
    return count;
}

/* Allocations whose memory is still taken, by a handle or a mapping. */
API int stub_live_allocations(void) {
    int count = 0;
    for (int i = 0; i < SLOTS; i++) count += chunks[i].id != 0;
    return count;
}

API int stub_live_mappings(void) {
    int count = 0;
    for (int i = 0; i < SLOTS; i++) count += mappings[i].size != 0;
    return count;
}

API int stub_live_reservations(void) {
    int count = 0;
    for (int i = 0; i < SLOTS; i++) count += reservations[i].size != 0;
    return count;
}
