/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding libtorch's functions (shim.h): dlopen with RTLD_NOLOAD gives the library that `import torch` loaded, never
 * another one.
 */
#include "shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct zpp_torch_functions zpp_torch;
static bool loaded;

/* --- the table --------------------------------------------------------------------------------------------------- */
enum kind { REQUIRED, OPTIONAL, CUDA };

static const struct entry {
    const char *name, *since;
    size_t offset_bytes;
    enum kind kind;
} entries[] = {
#define ENTRY(since, name, kind) { #name, since, offsetof(struct zpp_torch_functions, name), kind },
#define ZPP_TORCH(since, type, name, arguments) ENTRY(since, name, REQUIRED)
#define ZPP_TORCH_OPTIONAL(since, type, name, arguments) ENTRY(since, name, OPTIONAL)
#define ZPP_TORCH_CUDA(since, type, name, arguments) ENTRY(since, name, CUDA)
#include "shim.def"
#undef ZPP_TORCH
#undef ZPP_TORCH_OPTIONAL
#undef ZPP_TORCH_CUDA
};

static void find(void *library, const struct entry *entry, struct zpp_torch_functions *table) {
    void *address = library ? dlsym(library, entry->name) : NULL;
    memcpy((char *)table + entry->offset_bytes, &address, sizeof address);
}

static bool found(const struct zpp_torch_functions *table, const struct entry *entry) {
    void *address;
    memcpy(&address, (const char *)table + entry->offset_bytes, sizeof address);
    return address != NULL;
}

static void close_library(void *library) {
    if (library) dlclose(library);
}

static zpp_status check_version(const struct zpp_torch_functions *table, struct zpp_err *err) {
    const uint64_t version = table->aoti_torch_abi_version();
    const unsigned major = (unsigned)(version >> 56), minor = (unsigned)(version >> 48) & 0xff;
    if (major > 2 || (major == 2 && minor >= 11)) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT, "zeropp needs torch >= " ZPP_TORCH_OLDEST ", and this is torch %u.%u: "
                    "pip install 'torch>=" ZPP_TORCH_OLDEST "'", major, minor);
}

/* The version first: an old torch lacks functions too, and its number says more than their names. */
static zpp_status check_required(const struct zpp_torch_functions *table, struct zpp_err *err) {
    const zpp_status status = table->aoti_torch_abi_version ? check_version(table, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    for (size_t row = 0; row < sizeof entries / sizeof entries[0]; ++row) {
        if (entries[row].kind != REQUIRED || found(table, &entries[row])) continue;
        return zpp_fail(err, ZPP_NOT_BUILT, "zeropp needs torch >= " ZPP_TORCH_OLDEST ", and this libtorch lacks %s "
                        "(in torch since %s): pip install 'torch>=" ZPP_TORCH_OLDEST "'",
                        entries[row].name, entries[row].since);
    }
    return ZPP_OK;
}

zpp_status zpp_torch_load(struct zpp_err *err) {
    if (loaded) return ZPP_OK;
    void *cpu = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    if (!cpu) {
        return zpp_fail(err, ZPP_NOT_BUILT, "zeropp found no libtorch_cpu.so in this process: import torch (>= "
                        ZPP_TORCH_OLDEST ") before zeropp._C.load_torch()");
    }
    void *cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    struct zpp_torch_functions table;
    for (size_t row = 0; row < sizeof entries / sizeof entries[0]; ++row) {
        find(entries[row].kind == CUDA ? cuda : cpu, &entries[row], &table);
    }
    const zpp_status status = check_required(&table, err);
    close_library(cuda); /* our handles only: the libraries stay, torch never unloads them */
    close_library(cpu);
    if (status != ZPP_OK) return status;
    zpp_torch = table;
    loaded = true;
    return ZPP_OK;
}

/* --- dtypes ------------------------------------------------------------------------------------------------------ */
int32_t zpp_torch_dtype_of(zpp_dtype dtype) {
    switch (dtype) {
    case ZPP_F32: return zpp_torch.aoti_torch_dtype_float32();
    case ZPP_BF16: return zpp_torch.aoti_torch_dtype_bfloat16();
    case ZPP_F16: return zpp_torch.aoti_torch_dtype_float16();
    case ZPP_F64: return zpp_torch.aoti_torch_dtype_float64();
    case ZPP_I8: return zpp_torch.aoti_torch_dtype_int8();
    case ZPP_U8: return zpp_torch.aoti_torch_dtype_uint8();
    case ZPP_I16: return zpp_torch.aoti_torch_dtype_int16();
    case ZPP_I32: return zpp_torch.aoti_torch_dtype_int32();
    case ZPP_I64: return zpp_torch.aoti_torch_dtype_int64();
    case ZPP_BOOL: return zpp_torch.aoti_torch_dtype_bool();
    default: return -1;
    }
}

/* Return the dtype of a number of torch; ZPP_DTYPES for one that we do not have. */
static zpp_dtype dtype_of(int32_t torch_dtype) {
    int dtype = 0;
    while (dtype < ZPP_DTYPES && zpp_torch_dtype_of((zpp_dtype)dtype) != torch_dtype) dtype++;
    return (zpp_dtype)dtype;
}

/* --- tensors ----------------------------------------------------------------------------------------------------- */
zpp_status zpp_torch_look(AtenTensorHandle tensor, bool write, struct zpp_tensor *out, struct zpp_err *err) {
    struct zpp_tensor look = { 0 };
    int64_t elems = 0;
    const void *readable = NULL;
    AOTITorchError failed = zpp_torch.aoti_torch_get_numel(tensor, &elems);
    failed |= zpp_torch.aoti_torch_get_dtype(tensor, &look.torch_dtype);
    failed |= zpp_torch.aoti_torch_get_device_type(tensor, &look.device_type);
    failed |= zpp_torch.aoti_torch_get_device_index(tensor, &look.device_index);
    failed |= zpp_torch.aoti_torch_is_contiguous(tensor, &look.contiguous);
    if (write) failed |= zpp_torch.torch_get_mutable_data_ptr(tensor, &look.data);
    else failed |= zpp_torch.torch_get_const_data_ptr(tensor, &readable);
    if (failed) {
        const char *what = zpp_torch.torch_exception_get_what_without_backtrace
                               ? zpp_torch.torch_exception_get_what_without_backtrace() : NULL;
        return zpp_fail(err, ZPP_INVALID, "libtorch cannot read a tensor: %s", what ? what : "no reason given");
    }
    if (!write) look.data = (void *)(uintptr_t)readable;
    look.elems = (size_t)elems;
    look.dtype = dtype_of(look.torch_dtype);
    *out = look;
    return ZPP_OK;
}

/* --- adopted tensors --------------------------------------------------------------------------------------------- */
static struct {
    AtenTensorHandle *handles; /* NULL: empty */
    bool *used;
    size_t capacity;
} slots;

static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER; /* guards slots */

static bool grow_slots(void) {
    const size_t capacity = slots.capacity ? 2 * slots.capacity : 64;
    AtenTensorHandle *handles = realloc(slots.handles, capacity * sizeof *handles);
    if (!handles) return false;
    slots.handles = handles;
    bool *used = realloc(slots.used, capacity * sizeof *used);
    if (!used) return false;
    slots.used = used;
    memset(handles + slots.capacity, 0, (capacity - slots.capacity) * sizeof *handles);
    memset(used + slots.capacity, 0, (capacity - slots.capacity) * sizeof *used);
    slots.capacity = capacity;
    return true;
}

/* The lock is held. */
static bool is_slot(int64_t slot) { return slot >= 0 && (size_t)slot < slots.capacity && slots.used[slot]; }

int64_t zpp_torch_new_slot(void) {
    pthread_mutex_lock(&slots_lock);
    size_t slot = 0;
    while (slot < slots.capacity && slots.used[slot]) slot++;
    const bool full = slot == slots.capacity && !grow_slots();
    if (!full) slots.used[slot] = true;
    pthread_mutex_unlock(&slots_lock);
    return full ? -1 : (int64_t)slot;
}

AtenTensorHandle zpp_torch_adopted(int64_t slot) {
    pthread_mutex_lock(&slots_lock);
    AtenTensorHandle tensor = is_slot(slot) ? slots.handles[slot] : NULL;
    pthread_mutex_unlock(&slots_lock);
    return tensor;
}

/* Puts `tensor` in the slot, and gives back what was there to be deleted without the lock: a tensor's end may run
 * code. */
static AtenTensorHandle exchange(int64_t slot, AtenTensorHandle tensor) {
    AtenTensorHandle old = slots.handles[slot];
    slots.handles[slot] = tensor;
    return old;
}

bool zpp_torch_fill_slot(int64_t slot, AtenTensorHandle tensor) {
    pthread_mutex_lock(&slots_lock);
    const bool ok = is_slot(slot);
    AtenTensorHandle old = ok ? exchange(slot, tensor) : NULL;
    pthread_mutex_unlock(&slots_lock);
    if (old) zpp_torch.aoti_torch_delete_tensor_object(old);
    return ok;
}

void zpp_torch_drop_slot(int64_t slot) {
    pthread_mutex_lock(&slots_lock);
    const bool ok = is_slot(slot);
    AtenTensorHandle old = ok ? exchange(slot, NULL) : NULL;
    if (ok) slots.used[slot] = false;
    pthread_mutex_unlock(&slots_lock);
    if (old) zpp_torch.aoti_torch_delete_tensor_object(old);
}
