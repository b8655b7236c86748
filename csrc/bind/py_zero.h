/* SPDX-License-Identifier: Apache-2.0
 *
 * The Python objects around the coordinator, shared by py_zero.c (life), hooks.c (what modules and parameters call) and
 * py_step.c (what the optimizer calls).
 *
 *   Zero     one prepared model: the coordinator, and which pass is going on
 *   Unit     one unit: its parameters, and the class they have while whole and while released
 *   Trigger  stands in a module's `_compiled_call_impl`, so nn.Module.__call__ calls it instead of _call_impl; deepcopy
 *            and pickle drop that attribute, so copies are plain modules
 *
 * References: Zero -> Unit -> parameters -> hooks -> Unit is a cycle that Python's collector cannot see through,
 * because a part of it runs through torch's C++ objects. Zero.close() breaks it; the façade calls it when the model
 * dies.
 */
#ifndef ZPP_BIND_PY_ZERO_H
#define ZPP_BIND_PY_ZERO_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdbool.h>

#include "../base/pool.h"
#include "../zero/step_ahead.h"
#include "../zero/step_delayed.h"
#include "../zero/step_in_backward.h"

typedef struct Zero Zero;

typedef struct Unit {
    PyObject_HEAD
    Zero *zero;          /* owned reference */
    struct zpp_unit *unit;
    Py_ssize_t count;
    PyObject **params;   /* owned references; NULL after close */
    PyObject *plain, *released; /* classes; released NULL: never swapped */
    PyObject *grad_views; /* stage 0: list of tensors over the bucket; else NULL */
    bool is_plain;
    bool is_dtensor;     /* its parameters are DTensors, whose memory is that of their _local_tensor */
    const unsigned char *bound; /* the address that its parameters are views of */
    size_t got;          /* gradients that came in this backward */
    PyObject **grad_refs; /* [count]; keeps local gradients alive, see py_step.c */
} Unit;

/* A step inside the backward (py_step_in_backward.c). */
struct zpp_py_backward_step {
    PyObject *begin;  /* NULL: steps are not inside the backward */
    PyObject *mark_final, *step;
    zpp_step_in_backward *core;
};

/* Buffers that follow rank 0 (py_buffers.c). */
struct zpp_py_buffers {
    PyObject *where; /* () -> (addresses, afterwards); NULL: there are none */
    struct zpp_buffer *spans;
    Py_ssize_t count;
    bool due; /* the last forward built a graph, and was not inside no_sync */
};

/* Layers that a pass leaves out (py_layer_drop.c). */
struct zpp_py_layer_drop {
    PyObject *begin;   /* () -> None: a forward that builds a graph begins; NULL: no layer is ever left out */
    PyObject *turn;    /* (trains: bool) -> None: layers of an evaluation come now, or again those of training */
    bool trains;       /* what was said last */
    PyObject *dropped; /* bytes: 1 for each layer that the last such forward leaves out; NULL: none */
    PyObject *on_demand; /* bytes: 1 for each unit of which passes without gradients read parts; NULL: none */
};

/* Several backwards that are one pass (py_pass.c). */
struct zpp_py_pass {
    bool required, open; /* required: no backward is a pass of its own */
    bool begun;          /* a graph of it gave gradients */
    bool unsettled;      /* it was closed, and its reductions were not waited for */
    bool each;           /* every graph is reduced */
    int parts;           /* micro-batches whose mean is taken; 0: there was no pass */
    PyObject *units;     /* bytes: whose gradients the next backward brings; NULL: it brings none */
    int forwards;
};

struct Zero {
    PyObject_HEAD
    zpp_zero *core;
    Zero *next_engine; /* see zpp_py_list_engine */
    zpp_device *host;  /* the CPU */
    zpp_device *accelerator;                     /* where units are whole, borrowed; NULL: on the CPU */
    int32_t accelerator_type, accelerator_index; /* torch's */
    zpp_pool *pool;
    PyObject *comm;   /* _C.Comm of the data ranks, or NULL */
    PyObject *job;    /* ... of all ranks of the job; NULL: the data ranks are the job */
    PyObject *group_comms; /* list of _C.Comm, of groups */
    PyObject *intranode; /* of hpZ, or of a copy a host: _C.Comm of this host's ranks, or NULL */
    PyObject *units;  /* list of Unit */
    PyObject *optim_file;   /* _C.OptimFile or NULL */
    struct zpp_py_backward_step backward_step;
    struct zpp_py_buffers buffers;
    struct zpp_py_layer_drop layer_drop;
    struct zpp_py_pass pass;
    struct zpp_stepper stepper; /* from seal on */
    zpp_step_ahead *ahead;  /* NULL before the first step that is enqueued ahead of a GPU */
    zpp_delayed *delayed;   /* NULL before the first delayed step */
    PyObject *delayed_grads; /* list of what was p.grad, while a delayed step reads it; or NULL */
    int stage, ranks;
    char warning[512]; /* of the engine for parameters in a file; see py_unit_file.c */
    bool inconsistent; /* a step over parameters in a file failed half-way */
    uint64_t steps;   /* steps of Adam that succeeded */
    bool autos;       /* units gathered for single reads since the last release_all */
    bool moves;       /* some units are gathered and released */
    bool moves_frozen; /* some of those get no gradients */
    bool closed;
    bool trims;           /* memory of gradients that were taken goes back to the system; see backward.c */
    size_t untrimmed_bytes; /* of those that were taken since then */
    uint64_t timeout_ns;

    /* the pass that goes on */
    int depth;        /* triggers open */
    unsigned long caller; /* the thread that opened the outermost of them */
    bool outer_grad;  /* grad mode was on when the outermost trigger began */
    bool in_backward, reduces; /* reduces: this backward is not one that no_sync, accumulate or `hold` holds back */
    long task;        /* torch's graph task of this backward */
    long graded_task; /* the one whose grad mode was looked at last (create_graph) */
    int keep_passes;  /* create_graph: units stay whole for this many ends of backward */
    bool builds_loss; /* a forward's graph waits for its backward */
    bool graphs;      /* a forward left a graph since the last release_all; a backward need not have used it up */
    bool sync;        /* false inside no_sync */
    bool hold;        /* gradients stay on this rank at boundaries, too: a one-bit optimizer sends something else */
    bool boundary;    /* of this backward: it is neither inside no_sync nor before the last of `accumulate` */
    int accumulate, micro;
    bool at_boundary; /* the last backward was a boundary */
    uint64_t backwards;

    /* torch functions, and our callables for them */
    PyObject *current_graph_task_id, *is_grad_enabled, *queue_callback, *functorch_peek;
    PyObject *top_saved_hooks, *push_saved_hooks, *pop_saved_hooks, *current_node;
    PyObject *end_callback, *pack, *unpack;
    PyObject *raise_strays; /* () -> None: raises an error for stray reads (base/stray.h) */
    PyObject *check_unfrozen; /* () -> None: before a forward with gradients; NULL: no parameter can be unfrozen */
    PyObject *moved;          /* (unit) -> None: its whole memory has another address; NULL: not set */
    PyObject *arrived; /* () -> None: a backward ends; hands over gradients that it still holds. NULL: none ever is */
    PyObject *skipped; /* () -> None: a backward begins; calls skip for what is frozen. NULL: nothing is */
    PyObject *settled; /* () -> None: a pass at a boundary is reduced; adds what other stages have. NULL: nothing */
};

/* Interned attribute names, made once. */
extern PyObject *zpp_str_class, *zpp_str_grad, *zpp_str_data_ptr, *zpp_str_forward, *zpp_str_backward_hooks,
    *zpp_str_grad_fn, *zpp_str_register_hook_dict, *zpp_str_is_contiguous, *zpp_str_contiguous,
    *zpp_str_local_tensor, *zpp_str_sequence_nr;

/* py_unit.c: below all the others */
void zpp_py_wait_for(const Zero *zero, struct zpp_wait *wait);
/* At every entry that launches work: torch's current stream of this thread is the compute stream from now on, ordered
 * after the one before. Nothing to do on the CPU. 0, or -1 with an error set. */
int zpp_py_follow(Zero *zero);
int zpp_py_swap(Unit *unit, bool plain); /* class of all its parameters; 0 or -1 with an error set */
int zpp_py_need(Unit *unit, enum zpp_phase phase);           /* whole, and plain */
int zpp_py_release(Unit *unit);                              /* unless pinned or sticky */
int zpp_py_end_pass(Zero *zero);                             /* releases all but sticky units, which graphs may read */
int zpp_py_release_all(Zero *zero);                          /* releases those too, before values change */
/* As zpp_py_raise; a TierError has its file. */
PyObject *zpp_py_raise_zero(const Zero *zero, const struct zpp_err *err);
bool zpp_py_backward_runs(Zero *zero, long *task); /* torch's graph task id; false outside, or with an error set */
int zpp_py_call(PyObject *callable);                         /* without arguments; 0, or -1 with an error set */
int zpp_py_grad_mode(Zero *zero);                            /* 1, 0, or -1 with an error set */
/* Replace a DTensor by this rank's part of it; anything else, NULL too, stays. Takes the reference; NULL with an error
 * set. */
PyObject *zpp_py_local_of(const Unit *unit, PyObject *tensor);
void zpp_py_refuse_sparse(const Unit *unit, Py_ssize_t param); /* sets the error */
/* A parameter for messages: 'e.weight', in quotes. Returns `text`; keeps an exception that is set. */
enum { ZPP_PARAM_WORDS = 240 };
const char *zpp_py_param_words(const Unit *unit, Py_ssize_t param, char *text, size_t capacity);

/* hooks.c */
extern PyMethodDef zpp_py_hooks_methods[];
int zpp_py_hooks_init(PyObject *module);                     /* the types Trigger, ... */
int zpp_py_hooks_attach(Zero *zero);                         /* makes end_callback, pack, unpack */

/* py_buffers.c */
extern PyMethodDef zpp_py_buffers_methods[];
int zpp_py_sync_buffers(Zero *zero, bool grad); /* where buffers.where is set; 0, or -1 */
void zpp_py_buffers_end(Zero *zero);

/* py_layer_drop.c */
extern PyMethodDef zpp_py_layer_drop_methods[];
int zpp_py_layer_drop_begin(Zero *zero, bool grad); /* before an outermost forward; 0, or -1 with an error set */
/* A layer is called; `trains`: by the forward that began last, or its recomputation. 1: left out, 0: not, -1: error. */
int zpp_py_layer_enter(Zero *zero, Py_ssize_t layer, bool trains);
void zpp_py_layer_drop_forget(Zero *zero); /* what set_layer_drop gave */
void zpp_py_layer_drop_clear(Zero *zero);

/* backward.c */
int zpp_py_backward_init(void);
/* A sealed engine takes its place behind all others; a closed one is taken out. See "the end of a backward" there. */
void zpp_py_list_engine(Zero *zero);
void zpp_py_unlist_engine(Zero *zero);
PyObject *zpp_py_end_callback(Zero *zero);                   /* new reference */
PyObject *zpp_py_grad_hook(Unit *unit,
                           Py_ssize_t param); /* new reference: what register_post_accumulate_grad_hook takes */
int zpp_py_enter_backward(Zero *zero, bool recompute, long *task); /* 0 also when no backward runs: *task is -1 then */
int zpp_py_backward_over(Zero *zero);                        /* releases the units that the backward read */

/* A graph of an open pass; 0, or -1 with an error set. */
int zpp_py_graph_begin(Zero *zero);
int zpp_py_graph_end(Zero *zero);
int zpp_py_take_from_param(Unit *unit, Py_ssize_t index); /* its p.grad, if there is one */

/* py_settle.c: above py_unit.c alone */
/* Run the end of a graph or of a pass without Python's lock. 0, or -1 with an error set. */
int zpp_py_run_end(Zero *zero, zpp_status (*end)(zpp_zero *, const struct zpp_wait *, struct zpp_err *));
/* Stage 0, after a reduction: like DDP, every parameter that has a gradient on some rank has it on all. */
int zpp_py_show_gradients(Zero *zero);
/* Before gradients are read or cleared, a step, and another backward: wait for the reductions of a pass that was
 * closed. 0, or -1 with an error set. */
int zpp_py_settle(Zero *zero);
/* Let this thread add gradients of a pass while it waits for messages. It keeps the coordinator alive until no_more,
 * which leaves another thread's and another model's alone: they find nothing to add once their pass is settled. */
void zpp_py_drive(Zero *zero);
void zpp_py_drive_no_more(const Zero *zero);
void zpp_py_pass_end(Zero *zero); /* an exception ended it, or the model is gone */

/* py_pass.c */
extern PyMethodDef zpp_py_pass_methods[];

/* saved_tensors.c */
int zpp_py_saved_init(void);
int zpp_py_make_saved_hooks(Zero *zero);
int zpp_py_push_saved_hooks(Zero *zero);                     /* 1: pushed, 0: ours are on top already, -1: error */
void zpp_py_pop_saved_hooks(Zero *zero);                     /* keeps an exception that is set */

/* py_step.c */
extern PyMethodDef zpp_py_step_methods[];
extern PyMethodDef zpp_py_step_ahead_methods[];
void zpp_py_drop_grads(Unit *unit);
extern PyMethodDef zpp_py_unit_step_methods[]; /* of Unit */
/* Local gradients: hold p.grad, until it is forgotten and None. 0, or -1 with an error set. */
int zpp_py_hold_gradients(Unit *unit, bool *any);
int zpp_py_forget_gradients(Unit *unit);
/* The groups of adam_step(), from malloc; NULL with an error set. */
struct zpp_optim_segment *zpp_py_read_groups(PyObject *groups);
void zpp_py_delayed_end(Zero *zero); /* waits for the delayed step under way, whose values are lost */

/* py_optim_file.c */
/* Borrowed; NULL with an error set: not an OptimFile, or a closed one. */
zpp_optim_file *zpp_py_optim_file_get(PyObject *object);

/* py_step_in_backward.c: 0, or -1 with an error set */
extern PyMethodDef zpp_py_backward_methods[];
extern PyMethodDef zpp_py_backward_step_methods[];
int zpp_py_backward_step_begin(Zero *zero);                                        /* a backward has begun */
int zpp_py_backward_step_gradient(Unit *unit, Py_ssize_t param, bool partial);     /* one was handed over */
void zpp_py_backward_step_ahead(Zero *zero); /* a forward needs a unit, and has it */
int zpp_py_backward_step_drain(Zero *zero); /* all gradients have come: what is left is reduced and stepped */
int zpp_py_backward_step_close(Zero *zero); /* the backward has ended, all is reduced */
int zpp_py_backward_step_abort(Zero *zero);                                        /* ... by an exception */
int zpp_py_backward_step_require_ended(const Zero *zero, const char *what); /* the error names `what` is refused */
int zpp_py_backward_step_require_whole(const Unit *unit); /* ... if it is final in this backward */
void zpp_py_backward_step_forget(Zero *zero);


/* py_unit_file.c */
extern PyMethodDef zpp_py_unit_file_methods[];

#endif
